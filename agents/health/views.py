"""Verdicts on the views of NICs and GPUs, so that there is one truth about how an object is. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from agents.api.models import GpuSummary, GpuView, NicView, Verdict
from agents.api.words import Health
from agents.health.causes import WORST_FIRST
from agents.health.signals import OWN

V = TypeVar("V", NicView, GpuView)


def said(verdict: Verdict) -> str:
    """Its reason, and who says so if it is not this agent."""
    reason = verdict.reason if verdict.source == OWN else f"{verdict.reason} (says {verdict.source})"
    marks = "simulated" if verdict.simulated else ""
    if verdict.injected and "injected" not in reason:
        marks = f"{marks}, injected" if marks else "injected"
    return f"{reason} ({marks})" if marks and verdict.code else reason


def of_nics(nics: Iterable[tuple[NicView, object]], verdicts: list[Verdict]) -> list[NicView]:
    worst = _worst("nic", verdicts)
    return [_judged(view, worst.get(f"nic {view.name}")) for view, _judgement in nics]


def of_gpus(summary: GpuSummary, verdicts: list[Verdict]) -> GpuSummary:
    worst = _worst("gpu", verdicts)
    devices = [_judged(view, worst.get(f"gpu {view.index}")) for view in summary.devices]
    if not devices or summary.state is Health.UNKNOWN:
        return summary.model_copy(update={"devices": devices})
    state = min((device.state for device in devices), key=WORST_FIRST.index)
    return summary.model_copy(update={"devices": devices, "state": state})


def _worst(kind: str, verdicts: list[Verdict]) -> dict[str, Verdict]:
    worst: dict[str, Verdict] = {}
    for verdict in verdicts:  # worst first
        if verdict.kind == kind:
            worst.setdefault(verdict.object, verdict)
    return worst


def _judged(view: V, verdict: Verdict | None) -> V:
    if verdict is None or not verdict.code:
        return view  # well, or not in use: the view has that from the same reading
    return view.model_copy(update={"state": verdict.health, "reason": said(verdict)})
