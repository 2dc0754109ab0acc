"""Every fault keeps the contract, on a network in memory and on the real kernel: the same stories on both."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from agent_network import needs_root, settled
from fake_links import FakeClock, FakeLinks

from agents.api.faultspecs import SPECS, TARGETS
from agents.api.words import FaultState
from agents.faults.catalog import CATALOG, AnyFault, read_undo
from agents.faults.contract import Params, Refusal, Target
from agents.host.errors import HostError
from agents.host.gpus import Gpus, NodeGpus, NoGpus, Seen
from agents.host.machine import Machine
from agents.host.processes import start_time_of, state_of
from agents.host.simgpus import SimulatedGpus
from agents.host.workers import Armed, NoWorkers, Worker
from agents.injection.guard import Limits, check_params
from agents.injection.injector import Injection, Injector
from agents.injection.ledger import Ledger
from agents.injection.problems import FaultProblem
from ftar_core.wire.agentlink import ArmBreakpoints

UNSEEN = {"state-corrupt", "agent-kill"}  # nothing outside of the process shows it (yet)
PARAMS: dict[str, Params] = {  # of kinds that cannot do without
    "link-loss": {"percent": 5.0},
    "link-duplicate": {"percent": 5.0},
    "link-rate": {"mbit": 100},
    "link-delay": {"delay_ms": 5.0, "jitter_ms": 1.0},
    "link-corrupt": {"percent": 1.0},
    "link-reorder": {"percent": 10.0},
    "mem-hog": {"mb": 8},
    "replica-crash-at": {"point": "reduced", "within_s": 1.0},
    "disk-full": {"mb": 1},
    "partition": {"peers": "10.77.0.2, fd77:0::2"},
    "gpu-xid": {"xid": 79},
}


class Standing:
    """Workers that a test names."""

    def __init__(self, *workers: Worker) -> None:
        self._workers = workers
        self.waiting: dict[Worker, int] = {}
        self.taken = 0

    def all(self) -> tuple[Worker, ...]:
        return self._workers

    def tell(self, worker: Worker, message: msgspec.Struct) -> None:
        assert isinstance(message, ArmBreakpoints)
        self.taken += 1
        self.waiting[worker] = 0 if message.clear else self.waiting.get(worker, 0) + 1

    def listens(self, worker: Worker) -> bool:
        return True

    def armed(self, worker: Worker) -> Armed:
        return Armed(self.taken, self.waiting.get(worker, 0))


@pytest.fixture
def workers() -> Iterator[Standing]:
    """A replica with two ranks, which are processes that do nothing."""
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    try:
        yield Standing(*(Worker("r1", i, c.pid, start_time_of(c.pid) or 0) for i, c in enumerate(children)))
    finally:
        for child in children:
            child.kill()
            child.wait()


class Wires:
    """A namespace with a rail, on which faults are tried one after the other until one has left something there."""

    def __init__(self) -> None:
        from agent_network import Namespace, add_rail, add_routes
        from pyroute2 import IPRoute

        self.namespace = Namespace()
        with self.namespace.entered():
            # Duplicates are looked for a second and more, and `everything` waits for the end of it.
            Path("/proc/sys/net/ipv6/conf/default/dad_transmits").write_text("0")
            with IPRoute() as ipr:
                add_routes(ipr, add_rail(ipr, "rail0", 0), 0)
            self.untouched = everything()


@pytest.fixture(scope="module")
def wires() -> Iterator[list[Wires]]:
    """The one in use, once there is one."""
    made: list[Wires] = []
    yield made
    for one in made:
        one.namespace.close()


@pytest.fixture(params=["memory", pytest.param("kernel", marks=[pytest.mark.root, needs_root])])
def world(
    request: pytest.FixtureRequest,
    machine: Machine,
    tmp_path: Path,
    workers: Standing,
    fault: AnyFault,
    wires: list[Wires],
) -> Iterator[Machine]:
    """A rail with addresses and routes of many kinds; on the kernel only for faults that touch the network."""
    able = {"workers": workers, "coordinator": coordinator_of(workers), "end_agent": ends}
    if request.param == "memory":
        yield dataclasses.replace(machine, **able, gpus=gpus_for(fault, tmp_path))
        return
    if not wires:
        wires.append(Wires())
    used = wires.pop()
    try:
        with used.namespace.entered():
            yield Machine(scratch=tmp_path / "scratch", rails=("rail0",), gpus=gpus_for(fault, tmp_path), **able)
            after, before = everything(), used.untouched
            assert after == before, f"differs from before: {_difference(before, after)}"
    except BaseException:
        used.namespace.close()
        raise
    wires.append(used)


def _difference(before: list[object], after: list[object]) -> list[object]:
    first, second = (found[0] if isinstance(found[0], set) else set() for found in (before, after))
    return [{"gone": first - second, "new": second - first}, before[1:], after[1:]]


@pytest.fixture(params=list(CATALOG))
def fault(request: pytest.FixtureRequest) -> AnyFault:
    return CATALOG[request.param]


def coordinator_of(workers: Standing) -> Callable[[], Worker]:
    """A process that stands for the coordinator."""
    return lambda: msgspec.structs.replace(workers.all()[0], replica="coordinator", rank=-1)


def gpus_for(fault: AnyFault, folder: Path) -> Gpus:
    """Simulated ones for faults on GPUs; others must not ask for any, and run where the simulation was not built."""
    if fault.target != "gpu":
        return NoGpus()
    return NodeGpus(Seen, lambda gpu, code: None, SimulatedGpus.create(folder / "gpus", "node1", 2))


def ends(after_s: float) -> None:
    """In the place of the end of this process."""
    assert after_s > 0


@pytest.fixture
def able(world: Machine, fault: AnyFault) -> None:
    """Where this kernel lacks what a fault needs, the fault says what that is."""
    missing = fault.unsupported(world)
    if missing:
        assert "this kernel has no netem (modprobe sch_netem" in missing
        pytest.skip(missing)


def everything() -> list[object]:
    """All that faults on rails could leave behind in this namespace, after addresses have settled."""
    from pyroute2 import IPRoute

    with IPRoute() as ipr:
        index = int(ipr.link_lookup(ifname="rail0")[0])
        objects: set[str] = set()
        deadline = time.monotonic() + 60
        while (
            not any("fe80::" in text for text in objects) and time.monotonic() < deadline
        ):  # the kernel's own comes late
            objects = settled(ipr, index)
    shown = [["nft", "-j", "list", "ruleset"], ["tc", "-j", "qdisc", "show"]]
    return [objects, *(subprocess.run(argv, capture_output=True, text=True, check=True).stdout for argv in shown)]


def target_of(fault: AnyFault) -> Target:
    named = {"nic": Target("node1", "rail0"), "replica": Target("node1", replica="r1"), "gpu": Target("node1", gpu=1)}
    return named.get(fault.target, Target("node1"))


def params_of(fault: AnyFault) -> Params:
    params = check_params(fault.params, PARAMS.get(fault.kind, {}))
    assert not isinstance(params, Refusal)
    return params


def over(world: Machine, fault: AnyFault, undo: msgspec.Struct) -> bool:
    """As far as it can be: what cannot be undone is over when it has happened."""
    return fault.irreversible or fault.probe(world, undo).in_force is False


@pytest.mark.usefixtures("able")
def test_a_fault_is_seen_while_in_force_and_not_seen_after_its_undo(world: Machine, fault: AnyFault) -> None:
    assert fault.unsupported(world) == ""
    target, params = target_of(fault), params_of(fault)
    assert fault.check(world, target, params) is None
    undo = fault.plan(world, target, params)
    assert fault.probe(world, undo).in_force is not True
    fault.inject(world, undo)
    assert fault.probe(world, undo).in_force is (None if fault.kind in UNSEEN else True)
    undo = fault.settled(world, undo)
    assert fault.undo(world, undo)
    assert over(world, fault, undo)


@pytest.mark.usefixtures("able")
def test_the_undo_survives_its_way_over_the_disk(world: Machine, fault: AnyFault) -> None:
    undo = fault.plan(world, target_of(fault), params_of(fault))
    fault.inject(world, undo)
    reread = read_undo(fault, msgspec.json.encode(undo))
    assert reread == undo
    watchdogs = dataclasses.replace(world, workers=NoWorkers())
    if fault.kind == "replica-crash-at":  # no watchdog can speak with a rank, which forgets it by itself
        with pytest.raises(HostError, match="only the agent itself"):
            fault.undo(watchdogs, reread)
        if isinstance(world.clock, FakeClock):
            world.clock.boot += 1.1
        else:
            time.sleep(1.1)
    fault.undo(watchdogs, reread)
    assert over(watchdogs, fault, reread)


@pytest.mark.usefixtures("able")
def test_undoing_twice_or_without_a_fault_does_no_harm(world: Machine, fault: AnyFault) -> None:
    undo = fault.plan(world, target_of(fault), params_of(fault))
    fault.undo(world, undo)
    assert over(world, fault, undo)
    fault.inject(world, undo)
    fault.undo(world, undo)
    fault.undo(world, undo)
    assert over(world, fault, undo)


def test_what_waited_for_its_moment_is_over_when_that_has_come(
    machine: Machine, workers: Standing, ledger_directory: Path
) -> None:
    able = dataclasses.replace(machine, workers=workers)
    events: list[str] = []
    injector = Injector(
        Ledger(ledger_directory),
        able,
        Limits("node1", (), "mgmt0", max_faults=9, max_duration_s=900),
        lambda kind, _thing, _reason: events.append(kind),
    )
    injector.start()
    wish = Injection(
        "replica-crash-at", "ann", 60.0, replica="r1", params={"point": "reduced"}, allow_last_replica=True
    )
    entry = injector.inject(wish)
    injector.look()
    assert injector.open_faults(), "nobody has come there yet"
    with pytest.raises(FaultProblem, match="is on r1 already"):
        injector.inject(wish)
    for worker in workers.all():
        workers.waiting[worker] = 0  # it has been there
    injector.look()
    assert not injector.open_faults()
    found = injector.find(entry.id)
    assert found is not None
    assert "it has happened" in found.detail
    assert events == ["fault.active", "fault.reverted"]
    assert injector.inject(wish).state is FaultState.ACTIVE, "and the next one may come"
    injector.close()


def test_looking_and_planning_change_nothing(world: Machine, fault: AnyFault) -> None:
    before = _links(world)
    fault.check(world, target_of(fault), params_of(fault))
    undo = fault.plan(world, target_of(fault), params_of(fault))
    assert fault.by_hand(undo)
    assert all(state_of(w.pid, w.start_time) in tuple("RSD") for w in world.workers.all())
    assert _links(world) == before
    assert not world.scratch.exists()


def _links(world: Machine) -> list[object]:
    """Devices and addresses, but those that the kernel makes when it likes."""
    found = [(i, a.key) for i, own in world.links.all_addresses().items() for a in own if a.address[:5] != "fe80:"]
    return [[(nic.name, nic.up) for nic in world.links.nics()], sorted(found)]


def test_every_fault_says_what_it_is(fault: AnyFault) -> None:
    assert fault.summary
    assert fault.target in TARGETS
    assert all(param.help for param in fault.params)
    assert SPECS[fault.kind] is fault.spec


def test_every_published_kind_is_there_and_no_other() -> None:
    assert list(CATALOG) == list(SPECS)


def test_a_fault_that_reads_no_network_is_not_stopped_by_it(machine: Machine, links: FakeLinks) -> None:
    links.broken["nics"] = 1
    noop = CATALOG["noop"]
    undo = noop.plan(machine, Target("node1"), {})
    noop.inject(machine, undo)
    assert noop.probe(machine, undo).in_force is True
    noop.undo(machine, undo)


@pytest.mark.usefixtures("able")
def test_the_commands_by_hand_undo_it_as_they_stand(
    world: Machine, fault: AnyFault, request: pytest.FixtureRequest
) -> None:
    """A shell in that namespace runs them, one after the other; that nothing else is left, the fixture sees."""
    if "memory" in request.node.callspec.id:
        pytest.skip("nothing to run them on")
    undo = fault.plan(world, target_of(fault), params_of(fault))
    fault.inject(world, undo)
    undo = fault.settled(world, undo)
    commands = fault.by_hand(undo)
    for command in commands:
        if fault.kind == "state-corrupt":  # it has happened: the replica takes the state of another one
            assert command == "ftctl evict replica r1"
            continue
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)
    if fault.irreversible or commands[0].startswith("# nothing"):
        assert all(command.startswith(("#", "ftctl ")) for command in commands)
        return
    assert fault.probe(world, undo).in_force is False
    fault.undo(world, undo)  # the agent's own attempt, later: it finds nothing to do
