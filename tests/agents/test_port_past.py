"""The past of a rail: lost carriers, absences, repairs; over restarts of the agent, boots, faults and devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_links import FakeLinks

from agents.api.words import Health
from agents.health.desk import HealthDesk
from agents.host.links import Counters, LinkMode, Nic
from agents.host.sysfs import Sysfs
from agents.monitors.flaps import PortPast, carriers_lost
from agents.monitors.nicjudge import NicReading, Usual, judge, observed
from agents.monitors.nics import NicMonitor
from agents.monitors.portlimits import FlapLimits, NicLimits
from agents.monitors.portmemory import PortMemory
from agents.settings import SettingsProblem, load

UP = Nic("rail0", 2, "02:00:00:00:00:02", 1500, up=True, carrier=True)


class Node:
    """Two rails on a network in memory, its clock and its file."""

    def __init__(self, folder: Path, limits: NicLimits | None = None) -> None:
        self.links = FakeLinks()
        self.rail0, self.rail1 = self.links.add("rail0"), self.links.add("rail1")
        self.file = folder / "nics.json"
        self.boot, self.now, self.ahead, self.changes = "boot-1", 5000.0, 1.7e9, 0
        self.limits = limits or NicLimits()
        self.sysfs: Sysfs | None = None
        self.monitor = self.fresh()

    def fresh(self) -> NicMonitor:
        memory = PortMemory(self.file, self.boot)
        return NicMonitor(self.links, ("rail0", "rail1"), "mgmt0", self.limits, self.sysfs, memory)

    def restart(self, *, boot: str = "boot-1") -> None:
        self.boot = boot
        self.monitor = self.fresh()

    def carrier(self, carrier: bool, changes: int = 1) -> None:
        self.changes += changes
        self.links.change(self.rail0.index, carrier=carrier, counters=Counters(carrier_changes=self.changes))

    def look(self, after_s: float = 1.0, fault: str = "", lately: bool = False) -> list[str]:
        """Codes of rail0."""
        self.now += after_s
        faults = {"rail0": fault} if fault else {}
        found = self.monitor.read(self.now, faults, wall=self.now + self.ahead, lately=["rail0"] if lately else [])
        self.views = {view.name: view for view, _judgements in found}
        self.seen = {view.name: observed(view, judgements, faults.get(view.name, "")) for view, judgements in found}
        return [signal.code for signal in self.seen["rail0"].signals]

    def lose(self, after_s: float = 600.0) -> list[str]:
        """The carrier goes and comes between two looks."""
        self.carrier(True, 2)
        return self.look(after_s)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    node.look()
    return node


@pytest.mark.parametrize(
    ("was_up", "changes", "lost"),
    [(True, 0, 0), (True, 1, 1), (True, 2, 1), (True, 3, 2), (False, 1, 0), (False, 2, 1), (True, -5, 0)],
)
def test_how_many_carriers_were_lost(was_up: bool, changes: int, lost: int) -> None:
    assert carriers_lost(was_up, changes) == lost


def test_five_lost_carriers_in_a_day_are_flapping_until_an_operator_has_seen_to_it(node: Node) -> None:
    assert [node.lose() for _time in range(4)] == [[]] * 4
    assert node.lose() == ["nic.flaps"]
    assert node.look(3 * 86_400.0) == ["nic.flaps"]
    assert node.views["rail0"].state is Health.DEGRADED
    assert "lost its carrier 5 times within 24 h" in node.views["rail0"].reason
    node.restart(boot="boot-2")
    assert node.look(60.0) == ["nic.flaps"]
    assert node.monitor.clear("nic", "nic rail1") == frozenset()
    assert node.monitor.clear("nic", "nic rail0") == {"nic.flaps"}
    assert node.look() == []
    assert [node.lose() for _time in range(4)] == [[]] * 4  # from the beginning


def test_lost_carriers_of_another_day_do_not_count(node: Node) -> None:
    for _time in range(4):
        node.lose()
    node.look(86_400.0)
    assert node.lose() == []


def test_long_absences(node: Node) -> None:
    node.limits = NicLimits(flaps=FlapLimits(repair_times=64))
    node.restart()
    for away_s, codes in ((24.0, []), (25.0, []), (3600.0, []), (25.0, ["nic.flaps"])):
        node.carrier(False)
        assert node.look(1000.0) == ["nic.carrier"]
        node.carrier(True)
        assert node.look(away_s) == codes
    assert "back, 3 times within 24 h" in node.views["rail0"].reason


def test_a_window_clears_it_if_one_is_configured(tmp_path: Path) -> None:
    node = Node(tmp_path, NicLimits(flaps=FlapLimits(losses=2, clears_after_s=3600)))
    node.look()
    assert [node.lose(), node.lose()] == [[], ["nic.flaps"]]
    assert node.look(3500.0) == ["nic.flaps"]
    assert node.look(200.0) == []


def test_what_happened_while_the_agent_was_away(node: Node) -> None:
    node.lose()
    node.carrier(True, 8)
    node.restart()
    assert "nic.flaps" in node.look(300.0)


@pytest.mark.parametrize("how", ["a driver that is loaded again", "another device", "another boot", "a damaged file"])
def test_a_counter_that_went_back_is_no_storm(node: Node, how: str) -> None:
    node.carrier(True, 1000)
    node.restart()
    node.monitor.clear("nic", "nic rail0")
    node.look()
    node.monitor.clear("nic", "nic rail0")
    node.look()
    if how == "a driver that is loaded again":
        node.changes = 0
        node.carrier(True, 2)
    elif how == "another device":
        node.links.change(node.rail0.index, mac="02:00:00:00:00:99")
        node.carrier(True, 500)
    elif how == "another boot":
        node.carrier(True, 500)
        node.boot = "boot-2"
    else:
        node.carrier(True, 500)
        node.file.write_text("{garbage")
    node.restart(boot=node.boot)
    assert node.look() == []


def test_what_a_fault_of_ours_did_does_not_count(node: Node) -> None:
    for _time in range(6):
        node.carrier(False)
        assert node.look(30.0, fault="f-1") == ["nic.injected"]
        node.carrier(True)
        assert node.look(30.0, fault="f-1") == []
        node.carrier(True, 2)
        assert node.look(1.0, lately=True) == []
    assert node.look() == []


def test_an_administrator_who_sets_it_down_is_no_flap(node: Node) -> None:
    node.limits = NicLimits(flaps=FlapLimits(repair_times=64))
    node.restart()
    for _time in range(6):
        node.links.change(node.rail0.index, up=False)
        node.carrier(False)
        assert node.look(300.0) == ["nic.down"]
        node.links.change(node.rail0.index, up=True)
        node.carrier(True)
        assert node.look(5.0) == []


def test_the_third_time_within_an_hour_asks_for_repair(node: Node) -> None:
    for hint in ("switch port", "switch port", "repaired"):
        node.carrier(False)
        node.look(600.0)
        signal = node.seen["rail0"].signals[0]
        assert hint in signal.hint
        node.carrier(True)
        node.look(5.0)
    assert signal.reason == "no carrier; bad 3 times within 1 h: have it repaired"


def test_a_rail_that_is_gone_is_missed_three_times(node: Node) -> None:
    nic = node.links.devices.pop(node.rail0.index)
    assert [node.look() for _look in range(3)] == [[], [], ["nic.missing"]]
    assert node.seen["rail0"].health is Health.UNHEALTHY
    node.links.devices[nic.index] = nic
    assert node.look() == []


def test_a_rail_that_was_never_up_needs_a_peer_that_is(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for nic in (node.rail0, node.rail1):
        node.links.change(nic.index, carrier=False)
    assert node.look() == []
    assert node.seen["rail0"].health is Health.UNKNOWN
    node.links.change(node.rail1.index, carrier=True)
    assert node.look() == ["nic.carrier"]
    assert "was never up, though other rails are" in node.seen["rail0"].reason


def test_beside_its_peers_and_what_is_expected(node: Node, tmp_path: Path) -> None:
    node.links.modes = {"rail0": LinkMode(100_000, "full"), "rail1": LinkMode(400_000, "full")}
    assert node.look(31.0) == ["nic.speed"]
    assert "other rails have 400000 Mbit/s" in node.seen["rail0"].reason
    node.links.modes["rail0"] = LinkMode(400_000, "half")
    assert node.look(31.0) == ["nic.duplex"]
    node.links.modes["rail0"] = node.links.modes["rail1"]
    root = tmp_path / "sys"
    for name, index, width in (("rail0", 2, 8), ("rail1", 3, 16)):
        (root / f"class/net/{name}/device").mkdir(parents=True)
        (root / f"class/net/{name}/ifindex").write_text(f"{index}\n")
        (root / f"class/net/{name}/device/current_link_width").write_text(f"{width}\n")
    node.sysfs = Sysfs(root)
    node.restart()
    assert node.look(31.0) == ["nic.width"]
    (root / "class/net/rail0/ifindex").write_text("77\n")  # a sysfs of another network namespace
    assert node.look(31.0) == []
    node.limits = NicLimits(expect_speed_mbit=800_000)
    node.restart()
    assert node.look() == ["nic.speed"]
    assert "expected 800000" in node.seen["rail0"].reason


def test_the_management_nic_is_nobodys_incident(node: Node) -> None:
    mgmt = node.links.add("mgmt0", carrier=False)
    node.look()
    assert (node.seen["mgmt0"].health, node.seen["mgmt0"].signals) == (Health.UNHEALTHY, ())
    gateway = NicMonitor(node.links, ("rail0",), None)
    node.links.defaults = frozenset({mgmt.index})
    assert [v.role for v, _j in gateway.read(1.0, {}) if v.name == "mgmt0"] == ["mgmt"]


def test_one_fault_is_one_verdict() -> None:
    slow = NicReading("rail0", "rail", UP, mode=LinkMode(100, "half"), usual=Usual(400, "full", 16), pcie_width=8)
    assert judge(slow, NicLimits()).code == "nic.speed"
    assert judge(replace(slow, errors=6000, span_s=60.0), NicLimits()).code == "nic.errors"


def test_a_clear_ends_the_incident_at_once(node: Node) -> None:
    events: list[tuple[str, str]] = []
    desk = HealthDesk("node1", lambda kind, _thing, reason, **_more: events.append((kind, reason)), rails=["rail0"])
    desk.clears(node.monitor.clear)
    for _time in range(5):
        node.lose()
    desk.see("nics", [node.seen["rail0"]])
    assert desk.codes("nic", "nic rail0") == {"nic.flaps"}
    assert desk.clear("nic", "nic rail0", "cleared by ann: new optic") == 1
    assert events[-1][0] == "rail.up"
    node.look()
    desk.see("nics", [node.seen["rail0"]])
    assert desk.codes("nic", "nic rail0") == frozenset()
    assert "cleared by ann: new optic" in events[-1][1]


def test_the_past_is_bounded() -> None:
    past = PortPast()
    for now in range(1000):
        past.saw(float(now), up=True, lost=10_000, limits=FlapLimits())
        past.judged(float(now), bad=bool(now % 2))
    assert max(len(past.lost), len(past.bad), len(past.back)) <= 64


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("nics: {window: 5}", "nics.window: there is no such setting"),
        ("nics: {flaps: {losses: 0}}", "nics.flaps.losses"),
        ("rdma: {counters: {symbol_errors: []}}", "there is no counter 'symbol_errors'; there are link_downed"),
        ("rdma: {counters: {symbol_error: [{over: 1, health: unknown}]}}", "rdma.counters.symbol_error.0.health"),
        ("rdma: {counters: {symbol_error: [{over: 1, health: degraded, per_minute: 3}]}}", "there is no such setting"),
    ],
)
def test_bad_settings_are_one_line(tmp_path: Path, lines: str, words: str) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(f"node: node1\nstate_dir: {tmp_path}\ntokens_file: {tmp_path}/t\n{lines}\n")
    with pytest.raises(SettingsProblem) as problem:
        load(file)
    assert words in str(problem.value)
    assert "\n" not in str(problem.value)


def test_settings(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(
        f"node: node1\nstate_dir: {tmp_path}\ntokens_file: {tmp_path}/t\n"
        "nics: {expect_speed_mbit: 400000, flaps: {losses: 3, clears_after_s: 86400}}\n"
        "rdma: {counters: {link_downed: [{over: 1, health: unhealthy, window_s: 3600}]}}\n"
    )
    settings = load(file)
    assert settings.nics.flaps.losses == 3
    rules = [rule for name, rule in settings.rdma.rules if name == "link_downed"]
    assert [(rule.over, rule.window_s) for rule in rules] == [(1, 3600)]
