"""Every fault keeps the contract, on a network in memory and on the real kernel: the same stories on both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from agent_network import needs_root
from fake_links import FakeLinks

from agents.faults.catalog import CATALOG, AnyFault, read_undo
from agents.faults.contract import Target
from agents.host.machine import Machine

TARGET = Target("node1", "rail0")


@pytest.fixture(params=["memory", pytest.param("kernel", marks=[pytest.mark.root, needs_root])])
def world(request: pytest.FixtureRequest, machine: Machine, tmp_path: Path) -> Iterator[Machine]:
    if request.param == "memory":
        yield machine
        return
    from agent_network import Namespace, add_rail, add_routes
    from pyroute2 import IPRoute

    namespace = Namespace()
    try:
        with namespace.entered():
            with IPRoute() as ipr:
                add_routes(ipr, add_rail(ipr, "rail0", 0), 0)
            yield Machine(scratch=tmp_path / "scratch")
    finally:
        namespace.close()


@pytest.fixture(params=list(CATALOG))
def fault(request: pytest.FixtureRequest) -> AnyFault:
    return CATALOG[request.param]


def test_a_fault_is_seen_while_in_force_and_not_seen_after_its_undo(world: Machine, fault: AnyFault) -> None:
    assert fault.unsupported(world) == ""
    assert fault.check(world, TARGET, {}) is None
    undo = fault.plan(world, TARGET, {})
    assert fault.probe(world, undo).in_force is False
    fault.inject(world, undo)
    assert fault.probe(world, undo).in_force is True
    undo = fault.settled(world, undo)
    assert fault.undo(world, undo)
    assert fault.probe(world, undo).in_force is False


def test_the_undo_survives_its_way_over_the_disk(world: Machine, fault: AnyFault) -> None:
    undo = fault.plan(world, TARGET, {})
    fault.inject(world, undo)
    reread = read_undo(fault, msgspec.json.encode(undo))
    assert reread == undo
    fault.undo(world, reread)
    assert fault.probe(world, reread).in_force is False


def test_undoing_twice_or_without_a_fault_does_no_harm(world: Machine, fault: AnyFault) -> None:
    undo = fault.plan(world, TARGET, {})
    fault.undo(world, undo)
    assert fault.probe(world, undo).in_force is False
    fault.inject(world, undo)
    fault.undo(world, undo)
    fault.undo(world, undo)
    assert fault.probe(world, undo).in_force is False


def test_looking_and_planning_change_nothing(world: Machine, fault: AnyFault) -> None:
    before = world.links.nics()[0].up, world.links.all_addresses()
    fault.check(world, TARGET, {})
    undo = fault.plan(world, TARGET, {})
    assert fault.by_hand(undo)
    assert (world.links.nics()[0].up, world.links.all_addresses()) == before
    assert not world.scratch.exists()


def test_every_fault_says_what_it_is(fault: AnyFault) -> None:
    assert fault.summary
    assert fault.target in ("nic", "replica", "node")
    assert all(param.help for param in fault.params)


def test_a_fault_that_reads_no_network_is_not_stopped_by_it(machine: Machine, links: FakeLinks) -> None:
    links.broken["nics"] = 1
    noop = CATALOG["noop"]
    undo = noop.plan(machine, Target("node1"), {})
    noop.inject(machine, undo)
    assert noop.probe(machine, undo).in_force is True
    noop.undo(machine, undo)
