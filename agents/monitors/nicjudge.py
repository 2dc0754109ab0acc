"""Health of network interfaces: readings in, verdict with its reason out. Pure.

The thresholds are settings (portlimits.py). A NIC that is no rail may be down for good reasons and is nobody's
incident, the management NIC included. A rail that was never up is a fault only if another rail is up: else the node
may not be in use. What a fault of ours does to a NIC is said to be injected, and counts neither as flapping nor for
its past. What is worst is told by itself: one fault with two symptoms must not look like two faults."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agents.api.models import NicView
from agents.api.words import Action, Health
from agents.health.signals import Observed, Signal
from agents.host.links import LinkMode, Nic
from agents.monitors.flaps import PortPast
from agents.monitors.portlimits import NicLimits

RAIL, MANAGEMENT, OTHER = "rail", "mgmt", "other"
FLAPS = "nic.flaps"
CLEAR = "repair it, then clear it (ftctl clear)"
UNKNOWN_MODE = LinkMode()


@dataclass(frozen=True)
class Usual:
    """What a rail is to have: as configured, else as most of the rails that are up (of equally many, the better)."""

    speed_mbit: int | None = None
    duplex: str = ""
    pcie_width: int | None = None
    configured: bool = False


@dataclass(frozen=True)
class NicReading:
    """`nic` None: not there. Deltas are over the last `span_s` seconds. `fault`: id of our open fault on it, if any.
    `was_up`: at some time; `peers_up`: another rail is up. `missed`: looks since it was there, 0 if it never was."""

    name: str
    role: str
    nic: Nic | None
    carrier_changes: int = 0
    errors: int = 0
    span_s: float = 0.0
    fault: str = ""
    was_up: bool = True
    peers_up: bool = False
    missed: int = 0
    mode: LinkMode = UNKNOWN_MODE
    pcie_width: int | None = None
    usual: Usual = Usual()


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
        if 0 < reading.missed < limits.gone_polls:
            return Judgement(Health.UNKNOWN, "not seen at this look")
        hint = f"check the driver and the slot of {name}"
        return Judgement(Health.UNHEALTHY, "there is no such device", hint, "nic.missing", Action.CHECK)
    if not (nic.up and nic.carrier):
        return _down(reading, nic)
    if reading.carrier_changes > limits.carrier_changes:
        reason = f"flapping: the carrier changed {reading.carrier_changes} times within {reading.span_s:.0f} s"
        return Judgement(Health.DEGRADED, reason, f"check cable and optic of {name}", "nic.flapping", Action.CHECK)
    if reading.span_s > 0 and reading.errors / reading.span_s > limits.errors_per_s:
        reason = f"{reading.errors / reading.span_s:.0f} errors a second"
        return Judgement(Health.DEGRADED, reason, f"check cable and optic of {name}", "nic.errors", Action.CHECK)
    return _compared(reading)


def _down(reading: NicReading, nic: Nic) -> Judgement:
    name, what = reading.name, "no carrier" if nic.up else "down (administratively)"
    if reading.role == OTHER:
        return Judgement(Health.UNKNOWN, "not in use")
    if reading.role == RAIL and not reading.was_up:
        if not reading.peers_up:
            return Judgement(Health.UNKNOWN, f"{what} since it was first seen, and no other rail is up either")
        what += ", and was never up, though other rails are"
    if not nic.up:
        return Judgement(Health.UNHEALTHY, what, f"ip link set {name} up", "nic.down", Action.CHECK)
    hint = f"check cable, optic and switch port of {name}"
    return Judgement(Health.UNHEALTHY, what, hint, "nic.carrier", Action.CHECK)


def _compared(reading: NicReading) -> Judgement:
    """With what is expected, or with its peers."""
    usual, mode, width = reading.usual, reading.mode, reading.pcie_width
    whose = "expected" if usual.configured else "other rails have"
    hint = f"check cable, optic and switch port of {reading.name}"
    if mode.speed_mbit and usual.speed_mbit and mode.speed_mbit < usual.speed_mbit:
        reason = f"{mode.speed_mbit} Mbit/s, {whose} {usual.speed_mbit} Mbit/s"
        return Judgement(Health.DEGRADED, reason, hint, "nic.speed", Action.CHECK)
    if mode.duplex == "half" and usual.duplex == "full":
        return Judgement(Health.DEGRADED, f"half duplex, {whose} full", hint, "nic.duplex", Action.CHECK)
    if width and usual.pcie_width and width < usual.pcie_width:
        reason = f"{width} PCIe lanes, {whose} {usual.pcie_width}"
        return Judgement(Health.DEGRADED, reason, f"check the slot of {reading.name}", "nic.width", Action.CHECK)
    return Judgement(Health.HEALTHY, "up")


def with_past(judgement: Judgement, past: PortPast, now: float, limits: NicLimits) -> tuple[Judgement, ...]:
    """What is wrong now, and what its past adds up to; worst first, at least one."""
    repair = past.wants_repair(now, limits.flaps) if judgement.code else ""
    if repair:
        reason = f"{judgement.reason}; {repair}"
        judgement = replace(judgement, reason=reason, hint="have cable, optic and NIC repaired", action=Action.CHECK)
    if not past.flaps:
        return (judgement,)
    flaps = Judgement(Health.DEGRADED, f"flaps: {past.flaps}", CLEAR, FLAPS, Action.CHECK)
    return (flaps,) if judgement.health is Health.HEALTHY else (judgement, flaps)


def observed(view: NicView, judgements: tuple[Judgement, ...], fault: str) -> Observed:
    """For the incident book. A NIC that is no rail is nobody's incident."""
    name = f"nic {view.name}"
    first = judgements[0]
    if view.role == OTHER:
        return Observed("nic", name, first.reason, Health.UNKNOWN)
    if view.role == MANAGEMENT:
        return Observed("nic", name, first.reason, first.health)
    signals = tuple(
        Signal(
            kind="nic",
            object=name,
            code=one.code,
            health=one.health,
            reason=one.reason,
            action=one.action,
            hint=one.hint,
            injected=bool(fault) and one.code != FLAPS,
            fault=fault if one.code != FLAPS else "",
        )
        for one in judgements
        if one.code
    )
    return Observed("nic", name, first.reason, first.health, recovered=first.health is Health.HEALTHY, signals=signals)
