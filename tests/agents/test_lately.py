"""When a fault ended is known without the date."""

from __future__ import annotations

from pathlib import Path

from fake_links import FakeClock, FakeLinks
from hypothesis import given
from hypothesis import strategies as st

from agents.host.machine import Machine
from agents.injection.guard import Limits
from agents.injection.injector import Injection, Injector
from agents.injection.lately import Lately
from agents.injection.ledger import Ledger
from agents.injection.reverting import Reverter


def test_a_date_that_is_set_back_keeps_no_fault_alive(
    machine: Machine, clock: FakeClock, links: FakeLinks, ledger_directory: Path
) -> None:
    ledger = Ledger(ledger_directory)
    limits = Limits("node1", ("rail0", "rail1"), "mgmt0", max_faults=3, max_duration_s=900)
    reverter = Reverter(ledger, machine, sleep=lambda _s: None)
    injector = Injector(ledger, machine, limits, lambda *e: None, reverter=reverter)
    injector.start()
    old = injector.inject(Injection("link-down", "ann", 30.0, nic="rail0")).id
    injector.revert(old, "by ann")
    lately = Lately(lambda: clock.boot)
    assert lately.look(injector.entries(), 5.0) == frozenset(), "it ended before anybody looked"

    fault = injector.inject(Injection("link-down", "ann", 30.0, nic="rail1")).id
    assert lately.look(injector.entries(), 5.0) == frozenset()
    injector.revert(fault, "by ann")
    assert lately.look(injector.entries(), 5.0) == {fault}
    clock.wall -= 3600.0
    clock.boot += 4.0
    assert lately.look(injector.entries(), 5.0) == {fault}
    clock.boot += 2.0
    assert lately.look(injector.entries(), 5.0) == frozenset()
    assert links.devices[2].up


@given(st.floats(0, 100), st.floats(0, 100))
def test_nobody_ever_ended(passed: float, within: float) -> None:
    now = [0.0]
    lately = Lately(lambda: now[0])
    assert lately.look([], within) == frozenset()
    now[0] += passed
    assert lately.look([], within) == frozenset()
