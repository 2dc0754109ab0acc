"""What faults made with netem do to real packets. A kernel without it runs these in a virtual machine (`make vm`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_network import needs_root
from test_link_faults import Made, Wire

pytestmark = [pytest.mark.root, needs_root]


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    wire = Wire(tmp_path / "scratch")
    try:
        with wire.here.entered():
            missing = wire.machine.qdiscs.unsupported("netem")
        if missing:
            pytest.skip(missing)
        yield wire
    finally:
        wire.close()


def numbered(wire: Wire, count: int) -> list[int]:
    """Datagrams 0, 1, 2 and so on are sent; their numbers as they arrive."""
    for number in range(count):
        wire.near.sendto(number.to_bytes(4, "big") + bytes(96), ("10.77.0.2", 5000))
    arrived = []
    try:
        while True:
            arrived.append(int.from_bytes(wire.far["10.77.0.2"].recv(2048)[:4], "big"))
    except TimeoutError:
        return arrived


def test_a_delay_holds_what_is_sent_and_nothing_else(wire: Wire) -> None:
    made = Made(wire, "link-delay", delay_ms=120.0)
    began = time.monotonic()
    wire.near.sendto(b"x", ("10.77.0.2", 5000))
    wire.far["10.77.0.2"].recv(100)
    assert time.monotonic() - began >= 0.115
    assert wire.heard(20) == 20
    assert made.sentence() == "rail0 delays what it sends by 120 ms"
    made.undo()


def test_a_delay_with_jitter_loses_nothing(wire: Wire) -> None:
    made = Made(wire, "link-delay", delay_ms=20.0, jitter_ms=10.0)
    assert sorted(numbered(wire, 200)) == list(range(200))
    made.undo()


def test_damage_is_found_by_checksums_and_dropped(wire: Wire) -> None:
    made = Made(wire, "link-corrupt", percent=30.0)
    assert 550 <= wire.sent(1000) <= 850
    assert wire.heard(50) == 50
    made.undo()


def test_some_overtake_others_and_none_is_lost(wire: Wire) -> None:
    made = Made(wire, "link-reorder", percent=30.0, delay_ms=20.0)
    arrived = numbered(wire, 200)
    assert sorted(arrived) == list(range(200))
    assert arrived != sorted(arrived)
    made.undo()
    assert numbered(wire, 200) == list(range(200))
