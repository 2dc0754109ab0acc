"""What faults on links do to real packets between two namespaces, and what they leave alone."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_network import Namespace, needs_root
from fake_links import FakeLinks, FakeQdiscs, address, route

from agents.api.faultspecs import ParamValue
from agents.api.words import FaultState
from agents.faults.catalog import CATALOG
from agents.faults.contract import Params, Refusal, Target
from agents.host.machine import Machine
from agents.host.qdiscs import TC_H_ROOT, Qdisc, netem_options, tbf_options
from agents.host.sysfs import Sysfs
from agents.injection.deadlines import Deadlines
from agents.injection.guard import Limits, check_params
from agents.injection.injector import Injection, Injector
from agents.injection.ledger import Ledger
from agents.injection.reverting import Reverter

SO_RCVBUFFORCE = 33  # asm-generic/socket.h
RAIL = Target("node1", "rail0")


def params_of(kind: str, **given: ParamValue) -> Params:
    params = check_params(CATALOG[kind].params, given)
    assert not isinstance(params, Refusal), params
    return params


class Wire:
    """rail0 of ours to a far namespace, with UDP sockets at both ends."""

    def __init__(self, scratch: Path) -> None:
        from pyroute2 import IPRoute

        self.here, self.there = Namespace(), Namespace()
        with self.here.entered(), IPRoute() as ipr:
            ipr.link("add", ifname="rail0", kind="veth", peer={"ifname": "far0", "net_ns_fd": self.there._fd})
            ipr.link("set", index=1, state="up")
            self._up(ipr, "rail0", ["10.77.0.1"])
            self.machine = Machine(scratch=scratch, rails=("rail0",))
            self.near = self._socket("10.77.0.1")
        with self.there.entered(), IPRoute() as ipr:
            self._up(ipr, "far0", ["10.77.0.2", "10.77.0.3"])
            self.far = {host: self._socket(host) for host in ("10.77.0.2", "10.77.0.3")}
        deadline = time.monotonic() + 60
        while not (self.sent(1) and self.heard(1)):  # carrier and neighbours take a moment
            assert time.monotonic() < deadline

    def _up(self, ipr: object, name: str, addresses: list[str]) -> None:
        index = ipr.link_lookup(ifname=name)[0]  # type: ignore[attr-defined]
        ipr.link("set", index=index, state="up")  # type: ignore[attr-defined]
        for one in addresses:
            ipr.addr("add", index=index, address=one, prefixlen=24)  # type: ignore[attr-defined]

    def _socket(self, host: str) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 << 20)
        sock.bind((host, 5000))
        sock.settimeout(0.3)
        return sock

    def sent(self, count: int, to: str = "10.77.0.2", size: int = 100) -> int:
        """How many datagrams of ours arrive."""
        for _ in range(count):
            with contextlib.suppress(BlockingIOError):  # what waits in a queue counts against the socket
                self.near.sendto(bytes(size), socket.MSG_DONTWAIT, (to, 5000))
        return _drain(self.far[to])

    def heard(self, count: int, by: str = "10.77.0.2") -> int:
        """How many of theirs arrive."""
        for _ in range(count):
            self.far[by].sendto(bytes(100), ("10.77.0.1", 5000))
        return _drain(self.near)

    def close(self) -> None:
        for sock in (self.near, *self.far.values()):
            sock.close()
        self.here.close()
        self.there.close()


def _drain(sock: socket.socket) -> int:
    count = 0
    try:
        while True:
            sock.recv(65536)
            count += 1
    except TimeoutError:
        return count


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    wire = Wire(tmp_path / "scratch")
    try:
        yield wire
    finally:
        wire.close()


class Made:
    """A fault in force on the wire, and its sentence."""

    def __init__(self, wire: Wire, kind: str, target: Target = RAIL, **given: ParamValue) -> None:
        self.fault, self.wire = CATALOG[kind], wire
        with wire.here.entered():
            assert self.fault.unsupported(wire.machine) == ""
            params = params_of(kind, **given)
            assert self.fault.check(wire.machine, target, params) is None
            self.record = self.fault.plan(wire.machine, target, params)
            self.fault.inject(wire.machine, self.record)

    def sentence(self) -> str:
        with self.wire.here.entered():
            probe = self.fault.probe(self.wire.machine, self.record)
        assert probe.in_force is True
        return probe.sentence

    def undo(self) -> None:
        with self.wire.here.entered():
            self.fault.undo(self.wire.machine, self.record)
            assert self.fault.probe(self.wire.machine, self.record).in_force is False
        assert self.wire.sent(20) == 20
        assert self.wire.heard(20) == 20


@pytest.mark.root
@needs_root
@pytest.mark.parametrize(("direction", "sent", "heard"), [("out", 0, 5), ("in", 5, 0), ("both", 0, 0)])
def test_a_blackhole_swallows_its_direction_while_the_carrier_stays(
    wire: Wire, direction: str, sent: int, heard: int
) -> None:
    made = Made(wire, "link-blackhole", direction=direction)
    assert (wire.sent(5), wire.heard(5)) == (sent, heard)
    with wire.here.entered():
        assert all(nic.up and nic.carrier for nic in wire.machine.links.nics() if nic.name == "rail0")
    hit = int(made.sentence().partition("(")[2].split()[0])
    assert hit >= 5, made.sentence()
    made.undo()


@pytest.mark.root
@needs_root
def test_loss_loses_about_its_part(wire: Wire) -> None:
    made = Made(wire, "link-loss", percent=30, direction="out")
    assert 550 <= wire.sent(1000) <= 850
    assert wire.heard(50) == 50
    made.undo()


@pytest.mark.root
@needs_root
def test_duplicates_arrive_twice_at_least_and_end(wire: Wire) -> None:
    made = Made(wire, "link-duplicate", percent=100)
    assert wire.sent(50) >= 100
    made.undo()


@pytest.mark.root
@needs_root
def test_a_slow_rail_holds_a_queue_and_drops_the_rest(wire: Wire) -> None:
    made = Made(wire, "link-rate", mbit=1)
    began = time.monotonic()
    arrived = wire.sent(400, size=1400)
    passed_s = time.monotonic() - began  # more than the sending took
    assert 40 <= arrived <= 100 + passed_s * 125_000 / 1400, (
        "577 kB at once into a bucket of 64 kB and a queue of 70 kB"
    )
    assert made.sentence() == "rail0 sends at most 1 Mbit/s"
    made.undo()


@pytest.mark.root
@needs_root
def test_a_partition_cuts_off_those_who_are_named(wire: Wire) -> None:
    made = Made(wire, "partition", Target("node1"), peers="10.77.0.2")
    assert (wire.sent(5), wire.heard(5)) == (0, 0)
    assert (wire.sent(5, to="10.77.0.3"), wire.heard(5, by="10.77.0.3")) == (5, 5)
    made.undo()
    made = Made(wire, "partition", Target("node1"), peers="10.77.0.2", direction="in")
    assert (wire.sent(5), wire.heard(5)) == (5, 0)
    made.undo()


@pytest.mark.root
@needs_root
def test_what_others_put_on_a_rail_stays_and_refuses_us(wire: Wire) -> None:
    fault, params = CATALOG["link-rate"], params_of("link-rate", mbit=10)
    foreign = ["qdisc", "add", "dev", "rail0", "root", "handle", "7:", "pfifo", "limit", "99"]
    with wire.here.entered():
        subprocess.run(["tc", *foreign], check=True)
        before = subprocess.run(["tc", "-d", "qdisc"], capture_output=True, check=True).stdout
        refusal = fault.check(wire.machine, RAIL, params)
        assert refusal is not None
        assert "pfifo 7:" in refusal.reason
        record = fault.plan(wire.machine, RAIL, params)
        fault.undo(wire.machine, record)
        assert subprocess.run(["tc", "-d", "qdisc"], capture_output=True, check=True).stdout == before


@pytest.mark.root
@needs_root
def test_rules_of_others_stay_when_ours_come_and_go(wire: Wire) -> None:
    theirs = 'table netdev theirs { chain c { type filter hook ingress device "rail0" priority 0; counter accept; }; }'
    with wire.here.entered():
        subprocess.run(["nft", "-f", "-"], input=theirs, text=True, check=True)
        before = subprocess.run(["nft", "-s", "list", "ruleset"], capture_output=True, check=True).stdout
    Made(wire, "link-loss", percent=1).undo()
    with wire.here.entered():
        assert subprocess.run(["nft", "-s", "list", "ruleset"], capture_output=True, check=True).stdout == before


# --- without a kernel ---------------------------------------------------------------------------------------------


def test_options_are_what_pyroute2_makes_of_the_same_wish() -> None:
    from pyroute2.netlink.rtnl.tcmsg import sched_netem

    def shape(text: bytes, begin: int) -> dict[int, bytes]:
        from agents.host.rtnl import attr_map

        return attr_map(text, begin)

    values = sched_netem.get_parameters(
        {"delay": 5000, "jitter": 1000, "limit": 777, "loss": 0, "prob_reorder": 10, "prob_corrupt": 1, "gap": 1}
    )
    ours = netem_options(777, delay_ms=5, jitter_ms=1, corrupt=0.01, reorder=0.1, gap=1)
    attributes = shape(ours, 24)
    assert values["limit"] == int.from_bytes(ours[4:8], "little") == 777
    assert values["gap"] == int.from_bytes(ours[12:16], "little") == 1
    theirs = dict(values["attrs"])
    assert int.from_bytes(attributes[3][:4], "little") == pytest.approx(theirs["TCA_NETEM_REORDER"]["prob_reorder"], 4)
    assert int.from_bytes(attributes[4][:4], "little") == pytest.approx(theirs["TCA_NETEM_CORRUPT"]["prob_corrupt"], 4)
    assert int.from_bytes(attributes[10], "little") == 5_000_000
    assert int.from_bytes(attributes[11], "little") == 1_000_000
    assert len(shape(tbf_options(100, 50), 0)[1]) == 36


def test_a_kernel_without_netem_is_said_and_loses_only_what_needs_it(machine: Machine) -> None:
    machine = dataclasses.replace(machine, qdiscs=FakeQdiscs(lacking=frozenset({"netem"})))
    lacking = [kind for kind, fault in CATALOG.items() if kind.startswith("link-") and fault.unsupported(machine)]
    assert lacking == ["link-delay", "link-corrupt", "link-reorder"]


def test_a_foreign_queue_is_refused_by_name(machine: Machine) -> None:
    machine = dataclasses.replace(machine, qdiscs=FakeQdiscs({2: Qdisc("htb", 0x10000, TC_H_ROOT)}))
    refusal = CATALOG["link-delay"].check(machine, RAIL, params_of("link-delay", delay_ms=1))
    assert refusal is not None
    assert "htb 1:" in refusal.reason


@pytest.mark.parametrize("peers", ["", "node7", "10.0.0.1;drop", "10.0.0.1,", "10.0.0.0/8"])
def test_peers_are_addresses_and_nothing_else(machine: Machine, peers: str) -> None:
    refusal = CATALOG["partition"].check(machine, Target("node1"), {"peers": peers, "direction": "both"})
    assert refusal is not None
    assert refusal.code == "bad-request"


def test_an_active_rdma_port_is_warned_of(machine: Machine, tmp_path: Path) -> None:
    for part in ("class/net/rail0/device/infiniband/mlx5_0", "class/infiniband/mlx5_0/ports/1"):
        (tmp_path / "sys" / part).mkdir(parents=True)
    state = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state"
    machine = dataclasses.replace(machine, sysfs=Sysfs(tmp_path / "sys"))
    state.write_text("1: DOWN\n")
    assert CATALOG["link-loss"].warning(machine, RAIL) == ""
    state.write_text("4: ACTIVE\n")
    assert "mlx5_0 is active on rail0" in CATALOG["link-loss"].warning(machine, RAIL)
    assert CATALOG["link-down"].warning(machine, RAIL) == ""


def test_a_flapping_rail_keeps_its_rhythm_and_what_others_change_meanwhile(
    machine: Machine, links: FakeLinks, ledger_directory: Path
) -> None:
    links.table = [route("10.9.0.0/16", 2, gateway="10.0.0.2"), route("10.8.0.0/16", 2, gateway="10.0.0.2")]
    links.addrs[2] = [address("fd00::1/64")]
    ledger = Ledger(ledger_directory)
    limits = Limits("node1", ("rail0", "rail1"), "mgmt0", max_faults=3, max_duration_s=900)
    reverter = Reverter(ledger, machine, sleep=lambda _s: None)
    injector = Injector(ledger, machine, limits, lambda *_e: None, reverter=reverter)
    injector.start()
    deadlines = Deadlines(injector, lambda *_e: None, "node1")
    params: Params = {"period_ms": 1000.0, "down_percent": 30.0}
    entry = injector.inject(Injection("link-flap", "ann", 10.0, nic="rail0", params=params))
    seen = ""
    for turn in range(50):
        seen += "u" if links.devices[2].up else "d"
        if turn == 15:
            assert [r.destination for r in links.table] == ["10.9.0.0", "10.8.0.0"]
            links.table.pop()  # an operator takes a route away while the rail is up
        machine.clock.boot += 0.1  # type: ignore[attr-defined]
        deadlines.tick()
    assert seen.count("ud") == 4
    assert 13 <= seen.count("d") <= 18
    assert injector.revert(entry.id, "by ann").state is FaultState.REVERTED
    machine.clock.boot += 1.0  # type: ignore[attr-defined]
    deadlines.tick()
    assert links.devices[2].up
    assert [r.destination for r in links.table] == ["10.9.0.0"], "what was taken away in a pause stays away"
    assert [a.address for a in links.addrs[2]] == ["fd00::1"]
