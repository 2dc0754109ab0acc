"""What one reading says of a GPU: verdict with its reason. Pure."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from agents.api.words import Action, Health
from agents.health.signals import Observed, Signal
from agents.health.xids import recovery_words
from agents.monitors.nvml_child import GpuReading

NORMAL = ("power cap",)  # a GPU at work meets its power limit
DRIVER = -1  # in the place of a GPU's index
HOT_C = 90.0  # most data-centre GPUs throttle between 85 and 95 degrees
# What is done for the replica, by what the driver asks for (NVML field 230).
RECOVERY_ACTIONS = (Action.NONE, Action.EVICT, Action.EVICT_NODE, Action.DRAIN, Action.EVICT, Action.EVICT_NODE,
                    Action.EVICT, Action.EVICT_NODE)  # fmt: skip


class GpuLimits(msgspec.Struct, frozen=True):
    hot_c: float = HOT_C


class GpuJudgement(NamedTuple):
    """`code` as in agents.api.health.Verdict; empty for what is well."""

    health: Health
    reason: str
    code: str = ""
    action: Action = Action.NONE


def judge(reading: GpuReading, limits: GpuLimits = GpuLimits()) -> GpuJudgement:
    """The worst that one reading says of a GPU. What it does not tell speaks neither for nor against it."""
    bad = _unhealthy(reading) or _degraded(reading, limits)
    return bad if bad is not None else GpuJudgement(Health.HEALTHY, "answers")


def _unhealthy(reading: GpuReading) -> GpuJudgement | None:
    more = reading.more
    if reading.lost:
        return GpuJudgement(Health.UNHEALTHY, f"cannot be read: {reading.lost}", "gpu.lost", Action.EVICT)
    if number := int(more.get("recovery_action", 0)):
        action = RECOVERY_ACTIONS[number] if 0 < number < len(RECOVERY_ACTIONS) else Action.CHECK
        return GpuJudgement(
            Health.UNHEALTHY, f"its driver asks to {recovery_words(number)}", "gpu.recovery_action", action
        )
    if more.get("remap_failure"):
        reason = "a row of its memory could not be remapped"
        return GpuJudgement(Health.UNHEALTHY, reason, "gpu.remap_failure", Action.EVICT)
    if more.get("nvlinks_up", 0) < more.get("nvlinks", 0) and more.get("nvlinks_up"):  # all down: none in use
        reason = f"{more['nvlinks'] - more['nvlinks_up']:.0f} of {more['nvlinks']:.0f} NVLinks are down"
        return GpuJudgement(Health.UNHEALTHY, reason, "gpu.nvlink", Action.EVICT)
    return None


def _degraded(reading: GpuReading, limits: GpuLimits) -> GpuJudgement | None:
    more, degraded = reading.more, Health.DEGRADED
    if more.get("ecc_uncorrected"):
        reason = f"{more['ecc_uncorrected']:.0f} uncorrected memory errors since its driver was loaded"
        return GpuJudgement(degraded, reason, "gpu.ecc", Action.CHECK)
    if more.get("remap_pending"):
        return GpuJudgement(degraded, "a row remap waits for its next reset", "gpu.remap_pending", Action.RESET_IDLE)
    bad = [word for word in reading.throttle if word not in NORMAL]
    if bad:
        clock = f" at {more['clock_sm_mhz']:.0f} MHz" if "clock_sm_mhz" in more else ""
        return GpuJudgement(degraded, f"slowed down{clock}: {', '.join(bad)}", "gpu.throttle", Action.CHECK)
    if reading.temperature_c is not None and reading.temperature_c >= limits.hot_c:
        reason = f"{reading.temperature_c:.0f} degrees C: it will slow down"
        return GpuJudgement(degraded, reason, "gpu.hot", Action.WATCH)
    if more.get("pcie_width", 0) < more.get("pcie_width_max", 0):
        reason = f"PCIe at {more['pcie_width']:.0f} of {more['pcie_width_max']:.0f} lanes"
        return GpuJudgement(degraded, reason, "gpu.pcie", Action.CHECK)
    return None


def observed(reading: GpuReading, simulated: bool, fault: str = "") -> Observed:
    """For the incident book. That a GPU is whole again after an Xid only its driver can say (NVML field 230, which
    drivers before 570 have not got): ECC counters and clocks look the same before a reset and after it."""
    name, (health, reason, code, action) = f"gpu {reading.index}", judge(reading)
    if not code:
        whole = reading.more.get("recovery_action") == 0
        return Observed("gpu", name, reason, health, reading.uuid, simulated, recovered=whole)
    signal = Signal("gpu", name, code, health, reason, action, uuid=reading.uuid, injected=bool(fault), fault=fault,
                    simulated=simulated)  # fmt: skip
    return Observed("gpu", name, reason, health, reading.uuid, simulated, recovered=False, signals=(signal,))


def observed_driver(trouble: str, simulated: bool, fault: str = "") -> Observed:
    """The driver, as far as it answers at all. Nothing is known about its GPUs while it does not: nobody is evicted for
    that."""
    name = "gpu driver"
    if not trouble:
        return Observed("node", name, "answers", simulated=simulated)
    reason = f"GPUs cannot be read: {trouble}"
    signal = Signal("node", name, "gpu.probe", Health.UNKNOWN, reason, Action.CHECK, injected=bool(fault), fault=fault,
                    simulated=simulated)  # fmt: skip
    return Observed("node", name, reason, Health.UNKNOWN, simulated=simulated, recovered=False, signals=(signal,))
