"""The page that teaches how to write a fault: its fault is one."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import pytest
from fake_links import FakeLinks

import agents.faults
from agents.api.faultspecs import SPECS, Param, Spec
from agents.faults import contract, nics
from agents.faults.catalog import AnyFault, read_undo
from agents.faults.contract import Refusal, Target
from agents.host import links as links_module
from agents.host.errors import HostError
from agents.host.links import Nic
from agents.host.machine import Machine
from agents.host.rtnl import pack_attr
from agents.injection.guard import check_params

PAGE = Path(agents.faults.__file__).with_name("WRITING_FAULTS.md")


def test_the_fault_of_the_page_does_what_the_page_says(
    machine: Machine, links: FakeLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, fault_class, real, twin = (
        dedent(block) for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    )
    names: dict[str, Any] = {**vars(contract), "nics": nics, "HostError": HostError, "Nic": Nic, "msgspec": msgspec}
    names |= {"Spec": Spec, "Param": Param, "SPECS": dict(SPECS), "struct": struct, "pack_attr": pack_attr}
    names |= {name: value for name, value in vars(links_module).items() if name.isupper()}
    entry = eval(spec, names)
    names["SPECS"][entry.kind] = entry
    exec("from __future__ import annotations\n" + fault_class + real + twin, names)
    monkeypatch.setattr(FakeLinks, "set_mtu", names["set_mtu"], raising=False)
    fault: AnyFault = names["LinkMtu"]()
    nic = links.add("rail7")

    params = check_params(fault.params, {"mtu": 1400})
    assert not isinstance(params, Refusal)
    target = Target("node1", "rail7")
    assert fault.check(machine, target, params) is None
    undo = fault.plan(machine, target, params)
    assert read_undo(fault, msgspec.json.encode(undo)) == undo
    assert fault.probe(machine, undo).in_force is False
    fault.inject(machine, undo)
    assert links.devices[nic.index].mtu == 1400
    assert fault.probe(machine, undo).in_force is True
    assert fault.check(machine, target, params) is not None, "nothing would change"
    for _ in range(2):
        assert fault.undo(machine, undo)
        assert links.devices[nic.index].mtu == 1500
    assert fault.by_hand(undo) == ["ip link set dev rail7 mtu 1500"]
