"""The demo's result: what each incident cost, whether that is within the limits, as JSON and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from ftctl.render.document import Document, Json, account

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable

    from agents.api.models import JobAccount

SCHEMA = 1
# The most a healthy replica may be held up, in ms (stall, or for a rejoin the lengthening of its longest step).
LIMITS_MS = {
    "rail-down": 200.0,
    "rail-up": 200.0,
    "replica-killed": 500.0,
    "replica-rejoined": 200.0,
    "replica-drained": 100.0,
}


@dataclass(frozen=True)
class Incident:
    """`detect_ms` is None where nothing has to be detected: an operator asked for it.

    stall_ms: how long healthy replicas were held up (analysis.py); for a rejoin, by how much their longest step was
    longer than usual. recover_s: until the job was as before, or, for a drain, until the replica had left.
    """

    kind: str
    target: str
    detect_ms: float | None
    stall_ms: float | None
    steps_lost: int
    recover_s: float | None
    steps_retried: int = 0
    step: int | None = None  # the step that was held up most

    def failures(self) -> list[str]:
        """Why this incident does not pass; empty if it does."""
        found: list[str] = []
        limit = LIMITS_MS[self.kind]
        name = f"{self.kind} {self.target}"
        if self.stall_ms is None:
            found.append(f"{name}: the stall could not be measured")
        elif self.stall_ms > limit:
            found.append(f"{name}: healthy replicas were held up for {self.stall_ms:.0f} ms (limit {limit:.0f})")
        if self.steps_lost:
            found.append(f"{name}: {self.steps_lost} steps were lost")
        if self.kind == "replica-drained" and self.steps_retried:
            found.append(f"{name}: {self.steps_retried} steps were reduced again (a drain needs none)")
        if self.recover_s is None:
            found.append(f"{name}: no recovery was seen")
        return found


@dataclass
class Report:
    """The answer of `ftctl lab demo -o json`."""

    incidents: list[Incident] = field(default_factory=list)
    steps: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    parameters_identical: bool = False
    left_behind: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # beyond what the incidents say themselves
    seconds: float = 0.0
    calm_wait_ms: float | None = None
    calm_step_ms: float | None = None
    account: JobAccount | None = None  # where the job's time went

    def failures(self) -> list[str]:
        found = list(self.problems)
        for incident in self.incidents:
            found += incident.failures()
        if not self.incidents:
            found.append("no incident was played through")
        if not self.parameters_identical:
            found.append("the replicas did not end with identical parameters")
        if self.loss_first is None or self.loss_last is None:
            found.append("no loss was recorded")
        elif not self.loss_last < self.loss_first:
            found.append(f"the loss did not go down ({self.loss_first:.3f} to {self.loss_last:.3f})")
        found += [f"left behind: {thing}" for thing in self.left_behind]
        return found

    @property
    def passed(self) -> bool:
        return not self.failures()

    def document(self) -> Document:
        incidents: list[Json] = [_rounded(asdict(incident)) for incident in self.incidents]
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "incidents": incidents,
            "steps": self.steps,
            "loss_first": self.loss_first,
            "loss_last": self.loss_last,
            "parameters_identical": self.parameters_identical,
            "left_behind": list(self.left_behind),
            "failures": list(self.failures()),
            "limits_ms": dict(LIMITS_MS),
            "calm_wait_ms": _round(self.calm_wait_ms),
            "calm_step_ms": _round(self.calm_step_ms),
            "seconds": round(self.seconds, 1),
            "accounting": account(self.account),
        }

    def tables(self) -> list[ConsoleRenderable]:
        from rich.text import Text

        from ftctl.render.accounting import line
        from ftctl.render.tables import BAD, GOOD, Cell, table

        rows: list[list[Cell]] = []
        for incident in self.incidents:
            bad = incident.failures()
            limit = LIMITS_MS[incident.kind]
            rows.append(
                [
                    incident.kind,
                    incident.target,
                    _shown(incident.detect_ms, "ms"),
                    _shown(incident.stall_ms, "ms"),
                    f"{limit:.0f} ms",
                    str(incident.steps_lost),
                    _shown(incident.recover_s, "s", digits=1),
                    Text("no" if bad else "yes", style=BAD if bad else GOOD),
                ]
            )
        # Short heads: the table must fit a terminal of 80 columns. What is not ok is said below it, in full.
        heads = ["incident", "of", "detected", "stalled", "limit", "lost", "recovered", "ok"]
        facts: list[list[Cell]] = [
            ["steps", str(self.steps)],
            [
                "calm step",
                f"{_shown(self.calm_step_ms, 'ms')}, of that {_shown(self.calm_wait_ms, 'ms')} after the gradients",
            ],
            ["time", line(self.account) if self.account is not None else "not known"],
            ["loss", f"{_shown(self.loss_first, '', digits=3)} -> {_shown(self.loss_last, '', digits=3)}"],
            ["parameters", "bit-identical on all replicas" if self.parameters_identical else "not identical"],
            ["left behind", "; ".join(self.left_behind) or "nothing"],
            ["took", f"{self.seconds:.0f} s"],
        ]
        return [
            table("incidents: detected after, stalled for, steps lost, recovered after", heads, rows),
            table("the job", ["what", "value"], facts),
        ]


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _rounded(fields: dict[str, Json]) -> dict[str, Json]:
    return {key: _round(value) if isinstance(value, float) else value for key, value in fields.items()}


def _shown(value: float | None, unit: str, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f} {unit}".rstrip()
