"""Reads the journals of the replicas: JSON lines, one file a replica, appended over all its lives.

The format is the training side's (ftar_core.training.journal); a newer one may say more, so unknown keys are ignored. A
killed process leaves at most one torn line, which is skipped, and counted so that a report can say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `mono` and `t_*` are CLOCK_MONOTONIC seconds, the same clock for all processes of one machine."""

    kind: str  # start | end | epoch | rail | step
    mono: float
    time: float = 0.0
    # step
    step: int = 0
    term: int = 0
    epoch: int | None = None
    contributors: tuple[str, ...] = ()
    retries: int = 0
    t_produced: float | None = None
    t_commit: float | None = None
    replayed: bool = False  # committed by others, applied while catching up: it has no t_produced and no t_commit
    loss: float | None = None
    # rail
    peer: str = ""
    rail: str = ""
    direction: str = ""
    state: str = ""
    active: bool = False
    reason: str = ""
    t_event: float | None = None
    # epoch, start, end
    retry: bool = False
    incarnation: int = 0
    exit_code: int | None = None
    params_digest: str = ""
    optimizer_digest: str = ""


@dataclass(frozen=True)
class Journal:
    replica: str
    lines: tuple[Line, ...]
    torn: int = 0  # lines that are not JSON of this form

    def last_life_runs(self) -> bool:
        """True if the replica has not recorded an end since its last start."""
        return next((line.kind != "end" for line in reversed(self.lines) if line.kind in ("start", "end")), True)

    def of_kind(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line.kind == kind]


@dataclass(frozen=True)
class Journals:
    """All replicas' journals, by name."""

    by_replica: dict[str, Journal] = field(default_factory=dict)

    def __getitem__(self, replica: str) -> Journal:
        return self.by_replica.get(replica, Journal(replica, ()))


_decoder = msgspec.json.Decoder(Line)


def parse(replica: str, lines: Iterable[bytes]) -> Journal:
    good: list[Line] = []
    torn = 0
    for raw in lines:
        if not raw.strip():
            continue
        try:
            good.append(_decoder.decode(raw))
        except (msgspec.DecodeError, ValueError):
            torn += 1
    return Journal(replica, tuple(good), torn)


def read_all(directory: Path) -> Journals:
    """Every REPLICA.jsonl in this directory. Raises OSError."""
    found: dict[str, Journal] = {}
    for path in sorted(directory.glob("*.jsonl")):
        with path.open("rb") as file:
            found[path.stem] = parse(path.stem, file)
    return Journals(found)
