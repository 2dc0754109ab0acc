"""RDMA ports (InfiniBand, RoCE), read from sysfs: what is wrong with which, by its state, its counters and its peers.

Thresholds are those that public health tools use for the same counters. A port that was never up is no fault: nobody
may use it. Counters are compared with what they were up to an hour ago, and the last values are kept in a file, so that
what happened while the agent was away is seen too.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from agents.api.words import Action, Health
from agents.health.signals import Observed, Signal
from agents.host.sysfs import Sysfs

ACTIVE, LINK_UP = "4", "5"  # enum ib_port_state, and ib_port_phys_state of the kernel's ib_verbs.h
GONE_POLLS = 3
MAX_PORTS = 256
SAVE_S = 30.0
MINUTE_S, HOUR_S = 60.0, 3600.0
MAX_SAVED_BYTES = 1 << 20


@dataclass(frozen=True)
class Rule:
    """More than `over` of the counter within `window_s`; `per_s`: more than `over` a second."""

    counter: str
    over: float
    health: Health
    window_s: float = MINUTE_S
    per_s: bool = False


RULES = (
    Rule("link_downed", 0, Health.UNHEALTHY),
    Rule("excessive_buffer_overrun_errors", 0, Health.UNHEALTHY),
    Rule("local_link_integrity_errors", 0, Health.UNHEALTHY),
    Rule("rnr_nak_retry_err", 0, Health.UNHEALTHY),
    Rule("symbol_error", 120, Health.UNHEALTHY, window_s=HOUR_S),
    Rule("symbol_error", 10, Health.DEGRADED, per_s=True),
    Rule("link_error_recovery", 5, Health.DEGRADED),
    Rule("port_rcv_errors", 10, Health.DEGRADED, per_s=True),
    Rule("roce_slow_restart", 10, Health.DEGRADED, per_s=True),
    Rule("local_ack_timeout_err", 1, Health.DEGRADED, per_s=True),
    Rule("port_xmit_discards", 100, Health.DEGRADED, per_s=True),
)
COUNTERS = tuple(dict.fromkeys(rule.counter for rule in RULES))


@dataclass(frozen=True)
class Port:
    """`name`: "mlx5_0/1". `rate`, `width`: as sysfs writes them, "400 Gb/sec (4X NDR)" and PCIe lanes "16"."""

    name: str
    state: str
    phys: str
    rate: str = ""
    width: str = ""
    counters: Mapping[str, int] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        return self.state.partition(":")[0] == ACTIVE and self.phys.partition(":")[0] == LINK_UP


class _Saved(msgspec.Struct):
    """`time`: Unix seconds. `ports`: those that were up, with their counters."""

    time: float
    ports: dict[str, dict[str, int]]


@dataclass
class _History:
    """Samples (time, counters): about one a second of the last minute, about one a minute of the last hour."""

    up: bool = False
    missed: int = 0
    minute: deque[tuple[float, Mapping[str, int]]] = field(default_factory=lambda: deque(maxlen=600))
    hour: deque[tuple[float, Mapping[str, int]]] = field(default_factory=lambda: deque(maxlen=64))

    def add(self, now: float, counters: Mapping[str, int]) -> None:
        if self.minute and any(counters.get(name, 0) < old for name, old in self.minute[-1][1].items()):
            self.minute.clear()  # the driver was loaded again, and counts from 0
            self.hour.clear()
        self.minute.append((now, counters))
        if not self.hour or now - self.hour[-1][0] >= MINUTE_S:
            self.hour.append((now, counters))
        for samples, span_s in ((self.minute, MINUTE_S), (self.hour, HOUR_S)):
            while len(samples) > 1 and now - samples[0][0] > span_s:
                samples.popleft()

    def grown(self, rule: Rule) -> tuple[int, float]:
        """By how much within the rule's time, and the seconds in which it did."""
        then, before = (self.minute if rule.window_s <= MINUTE_S else self.hour)[0]
        now, counters = self.minute[-1]
        return counters.get(rule.counter, 0) - before.get(rule.counter, counters.get(rule.counter, 0)), now - then


class RdmaMonitor:
    """`read` wants to be called about once a second, from one thread."""

    def __init__(self, sysfs: Sysfs, saved: Path) -> None:
        self._sysfs = sysfs
        self._saved = saved
        self._known: dict[str, _History] = {}
        self._loaded = False
        self._saved_at = float("-inf")

    def read(self, now: float, wall: float) -> list[Observed]:
        """`now` monotonic, `wall` Unix seconds."""
        if not self._loaded:
            self._load(now, wall)
        ports = {port.name: port for port in ports_of(self._sysfs)}
        seen = [self._one(port, ports, now) for port in ports.values()]
        for name, history in list(self._known.items()):
            if name in ports:
                continue
            history.missed += 1
            if not history.up:
                del self._known[name]
            elif history.missed >= GONE_POLLS:
                seen.append(_bad(name, "rdma.gone", Health.UNHEALTHY, "there is no such port any more", Action.CHECK))
            else:
                seen.append(Observed("rdma", f"rdma {name}", "not seen at this look", Health.UNKNOWN, recovered=False))
        if ports and now - self._saved_at >= SAVE_S:
            self._saved_at = now
            self._save(ports, wall)
        return seen

    def _one(self, port: Port, ports: Mapping[str, Port], now: float) -> Observed:
        history = self._known.setdefault(port.name, _History())
        history.missed = 0
        history.add(now, port.counters)
        if not port.up:
            words = f"state {port.state or '?'}, link {port.phys or '?'}"
            if not history.up:
                return Observed("rdma", f"rdma {port.name}", f"not in use ({words})", Health.UNKNOWN)
            return _bad(port.name, "rdma.down", Health.UNHEALTHY, f"went down: {words}", Action.CHECK)
        history.up = True
        for rule in RULES:
            grown, span_s = history.grown(rule)
            if grown > (rule.over * max(span_s, 1.0) if rule.per_s else rule.over):
                reason = f"{rule.counter} grew by {grown} within {span_s:.0f} s"
                action = Action.CHECK if rule.health is Health.UNHEALTHY else Action.WATCH
                return _bad(port.name, f"rdma.{rule.counter}", rule.health, reason, action)
        for what in ("rate", "width"):
            mine = getattr(port, what)
            usual = _usual([getattr(other, what) for other in ports.values() if other.up])
            if mine and usual and _number(mine) < _number(usual):
                word = "PCIe lanes" if what == "width" else "rate"
                reason = f"{word} {mine}, its peers have {usual}"
                return _bad(port.name, f"rdma.{what}", Health.DEGRADED, reason, Action.CHECK)
        return Observed("rdma", f"rdma {port.name}", f"up, {port.rate}" if port.rate else "up")

    def _load(self, now: float, wall: float) -> None:
        """What was up when this was written, and its counters, as of that time or of a minute ago."""
        self._loaded = True
        try:
            with self._saved.open("rb") as file:
                saved = msgspec.json.decode(file.read(MAX_SAVED_BYTES), type=_Saved)
        except (OSError, msgspec.DecodeError, ValueError):
            return
        age_s = wall - saved.time
        if not 0 <= age_s <= HOUR_S:
            return
        for name, counters in list(saved.ports.items())[:MAX_PORTS]:
            history = self._known[name] = _History(up=True)
            history.minute.append((now - min(age_s, MINUTE_S), counters))
            history.hour.append((now - age_s, counters))

    def _save(self, ports: Mapping[str, Port], wall: float) -> None:
        up = {name: dict(port.counters) for name, port in ports.items() if self._known[name].up}
        fresh = self._saved.with_suffix(".new")
        with contextlib.suppress(OSError):  # a full disk: then what happens between two lives is not seen
            fresh.write_bytes(msgspec.json.encode(_Saved(wall, up)))
            os.replace(fresh, self._saved)


def ports_of(sysfs: Sysfs) -> list[Port]:
    """All RDMA ports but those of virtual functions, at most MAX_PORTS."""
    root = sysfs.root / "class/infiniband"
    try:
        found = sorted(path for path in root.glob("*/ports/*") if not (path.parents[1] / "device/physfn").exists())
    except OSError:
        return []
    return [_port(sysfs, path.parents[1].name, path.name) for path in found[:MAX_PORTS]]


def _port(sysfs: Sysfs, device: str, number: str) -> Port:
    base = f"class/infiniband/{device}"
    at = f"{base}/ports/{number}"
    counters: dict[str, int] = {}
    for name in COUNTERS:
        for folder in ("counters", "hw_counters"):
            value = sysfs.number(f"{at}/{folder}/{name}")
            if value is not None:
                counters[name] = value
                break
    width = sysfs.text(f"{base}/device/current_link_width") or ""
    state, phys, rate = (sysfs.text(f"{at}/{name}") or "" for name in ("state", "phys_state", "rate"))
    return Port(f"{device}/{number}", state, phys, rate, width, counters)


def _bad(name: str, code: str, health: Health, reason: str, action: Action) -> Observed:
    signal = Signal("rdma", f"rdma {name}", code, health, reason, action, hint="check cable, optic and switch port")
    return Observed("rdma", f"rdma {name}", reason, health, recovered=False, signals=(signal,))


def _usual(values: list[str]) -> str:
    """What more than half of at least three have."""
    told = Counter(value for value in values if value)
    value, count = next(iter(told.most_common(1)), ("", 0))
    return value if len(values) >= 3 and count * 2 > len(values) else ""


def _number(text: str) -> float:
    try:
        return float(text.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return 0.0
