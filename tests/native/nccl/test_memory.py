"""The user's memory is the copy to send again: what is in flight while rails are down costs the sender nothing, and the
receiver no more than the bound."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..net import NAMESPACES, Net
from .rig import QUICK, Rig
from .streams import MEGA

pytestmark = NAMESPACES
LARGE = 16 * MEGA
WINDOW = 8
WINDOW_BYTES = 32 * MEGA
MORE = 12 * MEGA  # the process's own noise; a tenth of what is in flight


def forget_peak(pid: int) -> int:
    """The peak of resident memory begins again; what it is now, in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak(pid)


def peak(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize("unposted", [WINDOW_BYTES, 5 * MEGA])
def test_a_sender_keeps_no_copy_of_what_is_in_flight_while_rails_are_down(unposted: int) -> None:
    options = f"{QUICK},window_bytes={WINDOW_BYTES},unposted_bytes={unposted}"
    variables = {"MALLOC_ARENA_MAX": "2", "FTAR_NET_OPTIONS": options}
    with Net(nodes=2) as net, Rig(net, **variables) as rig:
        rig.stream(0, 1, rig.connect(0, 1), [LARGE], window=WINDOW)
        rig.advance(2 * WINDOW)  # every buffer was used
        pids = [p.process.pid for p in rig.peers]
        before = [forget_peak(pid) for pid in pids]
        for rails in ((0,), (0, 1), (1,)):
            for rail in rails:
                net.link(0, rail, "down")
            if rails == (0, 1):
                done = [s["done"] for s in rig.states()]
                rig.until(lambda: rig.peers[0].ask("flying") == [WINDOW], "all requests are in flight")
                assert max(s["done"] for s in rig.states()) <= max(done) + WINDOW
            else:
                rig.advance(WINDOW)
            for rail in rails:
                net.link(0, rail, "up")
            rig.advance(WINDOW)
        grown = [peak(pid) - was for pid, was in zip(pids, before, strict=True)]
        said = f"sender and receiver grew by {grown} bytes, with {WINDOW * LARGE} in flight"
        assert grown[0] < MORE, said
        # What comes for a receive that is not posted yet waits in a receiver's memory, up to the bound; and this one
        # compares messages, which takes a copy of one or two.
        assert grown[1] < MORE + unposted + 2 * LARGE, said
