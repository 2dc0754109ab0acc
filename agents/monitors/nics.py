"""Health of network interfaces: readings in, verdict with its reason out.

Thresholds, from what public tools use for the same signals: more than 2 changes of carrier within a minute are flapping
(one unplugging and plugging in is 2); more than 10 receive or transmit errors a second are a bad cable or optic. A NIC
that is no rail and not the management NIC may be down for good reasons, so it is never a problem. What a fault of ours
does to a NIC is said to be injected and is not counted as flapping.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from agents.api.models import NicView
from agents.api.words import Action, Health
from agents.health.signals import Observed, Signal
from agents.host.links import Counters, Links, Nic
from agents.host.netobjects import Address

SPEED_EVERY_S = 30.0  # some drivers ask their firmware for the speed
RAIL, MANAGEMENT, OTHER = "rail", "mgmt", "other"


@dataclass(frozen=True)
class NicLimits:
    window_s: float = 60.0
    carrier_changes: int = 2  # within the window
    errors_per_s: float = 10.0


@dataclass(frozen=True)
class NicReading:
    """`nic` None: not there. Deltas are over the last `span_s` seconds. `fault`: id of our open fault on it, if any."""

    name: str
    role: str
    nic: Nic | None
    carrier_changes: int = 0
    errors: int = 0
    span_s: float = 0.0
    fault: str = ""


@dataclass(frozen=True)
class Judgement:
    """`code` as in agents.api.health.Verdict; `hint` is what a person would do."""

    health: Health
    reason: str
    hint: str = ""
    code: str = ""
    action: Action = Action.NONE


def judge(reading: NicReading, limits: NicLimits) -> Judgement:
    name, nic = reading.name, reading.nic
    if reading.fault and (nic is None or not nic.up or not nic.carrier):
        reason = f"down by fault {reading.fault} (injected)"
        hint = f"ftctl revert {reading.fault}, or wait for its end"
        return Judgement(Health.UNHEALTHY, reason, hint, "nic.injected", Action.WATCH)
    if nic is None:
        hint = f"check the driver and the slot of {name}"
        return Judgement(Health.UNHEALTHY, "there is no such device", hint, "nic.missing", Action.CHECK)
    if reading.role == OTHER and not (nic.up and nic.carrier):
        return Judgement(Health.UNKNOWN, "not in use")
    if not nic.up:
        hint = f"ip link set {name} up"
        return Judgement(Health.UNHEALTHY, "down (administratively)", hint, "nic.down", Action.CHECK)
    if not nic.carrier:
        hint = f"check cable, optic and switch port of {name}"
        return Judgement(Health.UNHEALTHY, "no carrier", hint, "nic.carrier", Action.CHECK)
    if reading.carrier_changes > limits.carrier_changes:
        reason = f"flapping: the carrier changed {reading.carrier_changes} times within {reading.span_s:.0f} s"
        return Judgement(Health.DEGRADED, reason, f"check cable and optic of {name}", "nic.flapping", Action.CHECK)
    if reading.span_s > 0 and reading.errors / reading.span_s > limits.errors_per_s:
        reason = f"{reading.errors / reading.span_s:.0f} errors a second"
        return Judgement(Health.DEGRADED, reason, f"check cable and optic of {name}", "nic.errors", Action.CHECK)
    return Judgement(Health.HEALTHY, "up")


def observed(view: NicView, judgement: Judgement, fault: str) -> Observed:
    """For the incident book. A NIC that is no rail and not the management NIC is nobody's incident."""
    name = f"nic {view.name}"
    if not judgement.code or view.role == OTHER:
        return Observed("nic", name, judgement.reason, judgement.health if view.role != OTHER else Health.UNKNOWN)
    signal = Signal(
        kind="nic",
        object=name,
        code=judgement.code,
        health=judgement.health,
        reason=judgement.reason,
        action=judgement.action,
        hint=judgement.hint,
        injected=bool(fault),
        fault=fault,
    )
    return Observed("nic", name, judgement.reason, judgement.health, signals=(signal,))


@dataclass
class _History:
    """What one NIC counted lately: (time, counters), oldest first."""

    samples: deque[tuple[float, Counters]] = field(default_factory=deque)
    speed_mbit: int | None = None
    speed_at: float = float("-inf")
    carrier: bool = False

    def add(self, now: float, counters: Counters, window_s: float) -> None:
        self.samples.append((now, counters))
        while len(self.samples) > 1 and now - self.samples[0][0] > window_s:
            self.samples.popleft()

    def reading(self, name: str, role: str, nic: Nic, fault: str) -> NicReading:
        (first_at, first), (last_at, last) = self.samples[0], self.samples[-1]
        errors = last.rx_errors + last.tx_errors - first.rx_errors - first.tx_errors
        changes = last.carrier_changes - first.carrier_changes
        return NicReading(name, role, nic, max(0, changes), max(0, errors), last_at - first_at, fault)


class NicMonitor:
    """Reads all NICs and judges them. `read` wants to be called regularly, from one thread."""

    def __init__(
        self, links: Links, rails: tuple[str, ...], management_nic: str | None, limits: NicLimits | None = None
    ) -> None:
        self._links = links
        self._rails = rails
        self._management = management_nic
        self._limits = limits or NicLimits()
        self._history: dict[str, _History] = {}

    def read(self, now: float, faults: dict[str, str]) -> list[tuple[NicView, Judgement]]:
        """`now` monotonic seconds; `faults`: NIC name -> id of our open fault. Rails first. Raises HostError."""
        nics = {nic.name: nic for nic in self._links.nics() if nic.name != "lo"}
        addresses = self._links.all_addresses()
        names = sorted([*nics, *(r for r in self._rails if r not in nics)], key=self._order)
        self._history = {name: self._history.get(name, _History()) for name in names}
        return [self._one(name, nics.get(name), addresses, now, faults.get(name, "")) for name in names]

    def _one(
        self, name: str, nic: Nic | None, addresses: dict[int, tuple[Address, ...]], now: float, fault: str
    ) -> tuple[NicView, Judgement]:
        role = self._role(name)
        if nic is None:
            verdict = judge(NicReading(name, role, None, fault=fault), self._limits)
            view = NicView(name=name, role=role, present=False, up=False, carrier=False, reason=verdict.reason)
            return view.model_copy(update={"state": verdict.health, "injected": bool(fault)}), verdict
        history = self._history[name]
        if fault:
            history.samples.clear()
        history.add(now, nic.counters, self._limits.window_s)
        if now - history.speed_at > SPEED_EVERY_S or nic.carrier != history.carrier:
            history.speed_mbit, history.speed_at = self._links.speed_mbit(name), now
            history.carrier = nic.carrier
        verdict = judge(history.reading(name, role, nic, fault), self._limits)
        counters = nic.counters
        view = NicView(
            name=name,
            role=role,
            present=True,
            up=nic.up,
            carrier=nic.carrier,
            speed_mbit=history.speed_mbit,
            addresses=[address.text for address in addresses.get(nic.index, ())],
            mac=nic.mac,
            mtu=nic.mtu,
            rx_bytes=counters.rx_bytes,
            tx_bytes=counters.tx_bytes,
            rx_errors=counters.rx_errors,
            tx_errors=counters.tx_errors,
            rx_dropped=counters.rx_dropped,
            tx_dropped=counters.tx_dropped,
            carrier_changes=counters.carrier_changes,
            state=verdict.health,
            reason=verdict.reason,
            injected=bool(fault),
        )
        return view, verdict

    def _role(self, name: str) -> str:
        if name in self._rails:
            return RAIL
        return MANAGEMENT if name == self._management else OTHER

    def _order(self, name: str) -> tuple[int, int, str]:
        place = self._rails.index(name) if name in self._rails else len(self._rails)
        return ((RAIL, MANAGEMENT, OTHER).index(self._role(name)), place, name)
