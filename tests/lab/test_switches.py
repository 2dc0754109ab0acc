"""A lab's switch knows of a pulled cable when it is pulled, however much happened just before."""

from __future__ import annotations

import os
import platform

import pytest
from pyroute2 import IPRoute

from ftctl.lab import namespaces
from ftctl.lab.switches import Switches

from .conftest import needs_namespaces

KERNEL = tuple(int(n) for n in platform.release().split("-")[0].split(".")[:2])
pytestmark = [
    pytest.mark.root,
    needs_namespaces,
    pytest.mark.skipif(KERNEL < (6, 8), reason="older kernels hold this news back in any case"),
]


def test_a_port_follows_its_cable_at_once_although_the_kernel_holds_such_news_back() -> None:
    home = namespaces.current_network()
    fabric = namespaces.new_network()
    namespaces.setns(home, namespaces.CLONE_NEWNET)
    os.close(home)
    with namespaces.inside(fabric), IPRoute() as ip:
        ip.link("add", ifname="br0", kind="bridge", br_stp_state=0)
        ip.link("add", ifname="n0r0", kind="veth", peer={"ifname": "rail0"})
        index = {name: ip.link_lookup(ifname=name)[0] for name in ("br0", "n0r0", "rail0")}
        ip.link("set", index=index["n0r0"], master=index["br0"])
        for name in ("br0", "n0r0", "rail0"):
            ip.link("set", index=index[name], state="up")
        switches = Switches(["n0r0", "a-port-that-is-gone"])
        seen = []
        for _ in range(10):
            for state in ("down", "up"):
                ip.link("set", index=index["rail0"], state=state)
                switches.look()
                # The bridge's own: it has carrier as long as it knows of a port that has. (To ask for the port's would
                # be another look.)
                (bridge,) = ip.get_links(index["br0"])
                seen.append(bridge.get_attr("IFLA_CARRIER"))
        switches.close()
    os.close(fabric)
    assert seen == [0, 1] * 10
