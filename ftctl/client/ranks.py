"""Rank processes: what the agent that supervises one knows, joined with what the rank itself reports."""

from __future__ import annotations

from dataclasses import dataclass

from agents.api.models import ProcessView, RankView
from ftar_core.wire.exits import RankExit
from ftctl.client.cluster import Snapshot


@dataclass(frozen=True)
class RankRow:
    """One rank: `process` when an agent supervises it, `report` when it has registered with one."""

    replica: str
    rank: int
    node: str
    process: ProcessView | None
    report: RankView | None


def rows(snapshot: Snapshot) -> list[RankRow]:
    """Every rank of the job that an agent supervises or has heard of, by replica and rank."""
    found: dict[tuple[str, int, str], RankRow] = {}
    for view in snapshot.views():
        for process in view.processes:
            place = (process.replica, process.rank, view.name)
            found[place] = RankRow(*place, process, None)
        for report in view.ranks:
            if report.job == snapshot.job_name:
                place = (report.replica, report.rank, view.name)
                known = found.get(place)
                found[place] = RankRow(*place, known.process if known else None, report)
    return [found[place] for place in sorted(found)]


def exit_word(code: int) -> str:
    """What an exit code of a rank means: a signal's number is negative, as subprocess has it."""
    if code < 0:
        return f"signal {-code}"
    try:
        return f"exit {code} ({RankExit(code).name.lower()})"
    except ValueError:
        return f"exit {code}"
