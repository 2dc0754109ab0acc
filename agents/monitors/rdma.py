"""RDMA ports (InfiniBand, RoCE), read from sysfs: what is wrong with which, by its state, its counters and its peers.

The thresholds are settings (portlimits.py). A port that was never up is no fault, since nobody may use it, unless it
is the only one of its kind that is not. Ports of virtual functions and of the management NIC are left out. Counters
are compared with what they were up to an hour ago; they and the past of each port are kept in a file, so that what
happened while the agent was away is seen too."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from agents.api.words import Action, Health
from agents.health.signals import Observed, Signal
from agents.host.sysfs import Sysfs
from agents.monitors.flaps import PortPast
from agents.monitors.portlimits import COUNTER_RULES, HOUR_S, MINUTE_S, CounterRule, RdmaLimits
from agents.monitors.portmemory import MAX_PORTS, PortMemory, PortRecord

ACTIVE, LINK_UP = "4", "5"  # enum ib_port_state, and ib_port_phys_state of the kernel's ib_verbs.h
FLAPS, GONE, PORTS = "rdma.flaps", "rdma.gone", "rdma ports"
PEERS = 3  # fewer have no majority
CHECK_CABLE = "check cable, optic and switch port"
REPAIR = "have cable, optic and adapter repaired"


@dataclass(frozen=True)
class Port:
    """`name`: "mlx5_0/1". `rate`, `width`: as sysfs writes them, "400 Gb/sec (4X NDR)" and PCIe lanes "16". `board`:
    what it is, such as "MT_0000000838"."""

    name: str
    state: str
    phys: str
    rate: str = ""
    width: str = ""
    board: str = ""
    layer: str = ""
    counters: Mapping[str, int] = field(default_factory=dict)

    def peers(self, ports: Mapping[str, Port]) -> list[Port]:
        """The others of its kind: the same board, and InfiniBand or Ethernet as this one."""
        mine = (self.board, self.layer)
        return [one for one in ports.values() if (one.board, one.layer) == mine and one.name != self.name]

    @property
    def up(self) -> bool:
        return self.state.partition(":")[0] == ACTIVE and self.phys.partition(":")[0] == LINK_UP


@dataclass(frozen=True)
class _Finding:
    code: str
    health: Health
    reason: str
    action: Action = Action.CHECK
    hint: str = CHECK_CABLE


@dataclass
class _History:
    """Samples (time, counters): about one a second of the last minute, about one a minute of the last hour."""

    past: PortPast = field(default_factory=PortPast)
    up: bool = False
    missed: int = 0
    minute: deque[tuple[float, Mapping[str, int]]] = field(default_factory=lambda: deque(maxlen=600))
    hour: deque[tuple[float, Mapping[str, int]]] = field(default_factory=lambda: deque(maxlen=64))

    def add(self, now: float, counters: Mapping[str, int]) -> None:
        if self.minute and any(counters.get(name, old) < old for name, old in self.minute[-1][1].items()):
            self.minute.clear()  # the driver was loaded again, and counts from 0
            self.hour.clear()
        self.minute.append((now, counters))
        if not self.hour or now - self.hour[-1][0] >= MINUTE_S:
            self.hour.append((now, counters))
        for samples, span_s in ((self.minute, MINUTE_S), (self.hour, HOUR_S)):
            while len(samples) > 1 and now - samples[0][0] > span_s:
                samples.popleft()

    def grown(self, counter: str, rule: CounterRule) -> tuple[int, float]:
        """By how much within the rule's time, and the seconds in which it did."""
        samples = self.minute if rule.window_s <= MINUTE_S else self.hour
        now, counters = self.minute[-1]
        then, before = next((one for one in samples if now - one[0] <= rule.window_s), samples[-1])
        return counters.get(counter, 0) - before.get(counter, counters.get(counter, 0)), now - then


class RdmaMonitor:
    """`read` wants to be called about once a second, from one thread; `clear` by any."""

    def __init__(self, sysfs: Sysfs, memory: PortMemory | None = None, limits: RdmaLimits | None = None) -> None:
        self._ports = _Ports(sysfs)
        self._memory = memory
        self._limits = limits or RdmaLimits()
        self._rules = self._limits.rules
        self._lock = threading.Lock()
        self._known: dict[str, _History] = {}
        self._loaded = memory is None

    def read(self, now: float, wall: float, left_out: Collection[str] = ()) -> list[Observed]:
        """`now` monotonic, `wall` Unix seconds; `left_out`: network devices whose ports are not to be watched."""
        ports = self._ports.read(left_out)
        with self._lock:
            if not self._loaded:
                self._load(now, wall)
            for port in ports.values():
                self._look(port, now)
            seen = [self._one(port, ports, now) for port in ports.values()]
            absent = [self._absent(name, now) for name in list(self._known) if name not in ports]
            seen += [one for one in absent if one is not None]
            if self._memory is not None and self._known:
                self._memory.save(now, wall, {name: self._record(name) for name in self._known})
        return seen + self._counted(ports)

    def clear(self, kind: str, name: str) -> frozenset[str]:
        """An operator has seen to it: its past is forgotten, and one that is gone. Returns the codes that are over."""
        port = name.removeprefix("rdma ")
        with self._lock:
            history = self._known.get(port) if kind == "rdma" else None
            if history is None:
                return frozenset()
            if history.missed:
                del self._known[port]
                return frozenset({FLAPS, GONE})
            return frozenset({FLAPS}) if history.past.clear() else frozenset()

    def _look(self, port: Port, now: float) -> None:
        history = self._known.setdefault(port.name, _History())
        history.missed = 0
        before = history.minute[-1][1] if history.minute else port.counters
        history.add(now, port.counters)
        counted = port.counters.get("link_downed", 0) - before.get("link_downed", 0)
        lost = max(int(history.up and not port.up), counted if history.past.was_up else 0)
        history.up = port.up
        history.past.saw(now, up=port.up, lost=lost, limits=self._limits.flaps)

    def _absent(self, name: str, now: float) -> Observed | None:
        history = self._known[name]
        history.missed += 1
        if not history.past.was_up:
            del self._known[name]
            return None
        if history.missed < self._limits.gone_polls:
            return Observed("rdma", f"rdma {name}", "not seen at this look", Health.UNKNOWN, recovered=False)
        history.up = False
        history.past.saw(now, up=False, lost=0, limits=self._limits.flaps)
        return self._told(name, _Finding(GONE, Health.UNHEALTHY, "there is no such port any more"), now)

    def _one(self, port: Port, ports: Mapping[str, Port], now: float) -> Observed:
        finding = self._finding(port, ports)
        if finding is not None or self._known[port.name].past.flaps:
            return self._told(port.name, finding, now)
        self._known[port.name].past.judged(now, bad=False)
        if not port.up:
            return Observed("rdma", f"rdma {port.name}", f"not in use ({_state(port)})", Health.UNKNOWN)
        return Observed("rdma", f"rdma {port.name}", f"up, {port.rate}" if port.rate else "up")

    def _finding(self, port: Port, ports: Mapping[str, Port]) -> _Finding | None:
        """What is worst, by itself: one fault with two symptoms must not look like two faults."""
        history = self._known[port.name]
        if not port.up and history.past.was_up:
            return _Finding("rdma.down", Health.UNHEALTHY, f"went down: {_state(port)}")
        if not port.up:
            kin = port.peers(ports)
            if not port.board or len(kin) < PEERS or not all(one.up for one in kin):
                return None
            return _Finding(
                "rdma.unused", Health.DEGRADED, f"was never up, though all {len(kin)} others of its kind are"
            )
        for counter, rule in self._rules:
            grown, span_s = history.grown(counter, rule)
            if grown > (rule.over * max(span_s, 1.0) if rule.per_s else rule.over):
                reason = f"{counter} grew by {grown} within {span_s:.0f} s"
                action = Action.CHECK if rule.health is Health.UNHEALTHY else Action.WATCH
                return _Finding(f"rdma.{counter}", rule.health, reason, action)
        return self._compared(port, ports)

    def _compared(self, port: Port, ports: Mapping[str, Port]) -> _Finding | None:
        """With what is expected, or with its peers."""
        limits = self._limits
        for what, word, expected in (
            ("rate", "rate", limits.expect_rate_gbit),
            ("width", "PCIe lanes", limits.expect_pcie_width),
        ):
            mine = getattr(port, what)
            alike = [port, *port.peers(ports)]
            usual = _usual([getattr(other, what) for other in alike if other.up]) if expected is None else ""
            wanted = _number(usual) if expected is None else expected
            if mine and _number(mine) < wanted:
                whose = f"its peers have {usual}" if usual else f"{wanted:g} is expected"
                return _Finding(f"rdma.{what}", Health.DEGRADED, f"{word} {mine}, {whose}")
        return None

    def _told(self, name: str, finding: _Finding | None, now: float) -> Observed:
        past, found = self._known[name].past, []
        past.judged(now, bad=finding is not None)
        if finding is not None:
            repair = past.wants_repair(now, self._limits.flaps)
            reason = f"{finding.reason}; {repair}" if repair else finding.reason
            action, hint = (Action.CHECK, REPAIR) if repair else (finding.action, finding.hint)
            found.append(_signal(f"rdma {name}", _Finding(finding.code, finding.health, reason, action, hint)))
        if past.flaps:
            hint = "repair it, then clear it (ftctl clear)"
            found.append(_signal(f"rdma {name}", _Finding(FLAPS, Health.DEGRADED, f"flaps: {past.flaps}", hint=hint)))
        first = found[0]
        return Observed("rdma", f"rdma {name}", first.reason, first.health, recovered=False, signals=tuple(found))

    def _counted(self, ports: Mapping[str, Port]) -> list[Observed]:
        expected, up = self._limits.expect_ports, sum(port.up for port in ports.values())
        if expected is None:
            return []
        if up >= expected:
            return [Observed("rdma", PORTS, f"{up} are up")]
        finding = _Finding("rdma.ports", Health.UNHEALTHY, f"{up} are up, {expected} are expected")
        signal = _signal(PORTS, finding)
        return [Observed("rdma", PORTS, finding.reason, finding.health, recovered=False, signals=(signal,))]

    def _load(self, now: float, wall: float) -> None:
        """What there was when this was written, and its counters, as of that time or of a minute ago."""
        self._loaded = True
        assert self._memory is not None  # noqa: S101 - nothing is to be loaded without
        known = self._memory.load(now, wall)
        for name, record in known.ports.items():
            history = self._known[name] = _History(record.past, record.up)
            if known.age_s <= HOUR_S and record.counters:
                history.minute.append((now - min(known.age_s, MINUTE_S), record.counters))
                history.hour.append((now - known.age_s, record.counters))

    def _record(self, name: str) -> PortRecord:
        history = self._known[name]
        return PortRecord(history.past, dict(history.minute[-1][1]) if history.minute else {}, up=history.up)


class _Ports:
    """All RDMA ports but those of virtual functions, at most MAX_PORTS. What a port cannot change is read once."""

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs
        self._root = f"{sysfs.root}/class/infiniband"
        self._known: dict[str, tuple[str, str, dict[str, str]]] = {}  # board, layer, files of counters; by port

    def read(self, left_out: Collection[str]) -> dict[str, Port]:
        """`left_out`: network devices whose ports are not to be watched."""
        names = [(device, number) for device in _names(self._root) for number in self._numbers(device, left_out)]
        found = {f"{device}/{number}": self._port(device, number) for device, number in names[:MAX_PORTS]}
        self._known = {name: known for name, known in self._known.items() if name in found}
        return found

    def _numbers(self, device: str, left_out: Collection[str]) -> list[str]:
        base = f"{self._root}/{device}/device"
        if os.path.exists(f"{base}/physfn") or any(os.path.exists(f"{base}/net/{name}") for name in left_out):
            return []
        return _names(f"{self._root}/{device}/ports")

    def _port(self, device: str, number: str) -> Port:
        name, base = f"{device}/{number}", f"class/infiniband/{device}"
        at = f"{base}/ports/{number}"
        if name not in self._known:
            text = self._sysfs.text
            self._known[name] = (text(f"{base}/board_id") or "", text(f"{at}/link_layer") or "", self._files(at))
        board, layer, files = self._known[name]
        values = {counter: self._sysfs.number(file) for counter, file in files.items()}
        counters = {counter: value for counter, value in values.items() if value is not None}
        state, phys, rate = (self._sysfs.text(f"{at}/{word}") or "" for word in ("state", "phys_state", "rate"))
        width = self._sysfs.text(f"{base}/device/current_link_width") or ""
        return Port(name, state, phys, rate, width, board, layer, counters)

    def _files(self, at: str) -> dict[str, str]:
        places = [(folder, set(_names(f"{self._sysfs.root}/{at}/{folder}"))) for folder in ("hw_counters", "counters")]
        return {name: f"{at}/{folder}/{name}" for folder, there in places for name in COUNTER_RULES if name in there}


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _state(port: Port) -> str:
    return f"state {port.state or '?'}, link {port.phys or '?'}"


def _signal(thing: str, finding: _Finding) -> Signal:
    return Signal("rdma", thing, finding.code, finding.health, finding.reason, finding.action, hint=finding.hint)


def _usual(values: list[str]) -> str:
    """What more than half of at least three have."""
    told = Counter(value for value in values if value)
    value, count = next(iter(told.most_common(1)), ("", 0))
    return value if len(values) >= PEERS and count * 2 > len(values) else ""


def _number(text: str) -> float:
    try:
        return float(text.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return 0.0
