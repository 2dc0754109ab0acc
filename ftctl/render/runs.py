"""Chaos runs that have just ended, for people and for machines."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from ftctl.context import World
from ftctl.errors import CliError
from ftctl.options import OutputFormat
from ftctl.playbook import judging
from ftctl.playbook.judging import Judged
from ftctl.playbook.verdict import Finished
from ftctl.render import document, tables


def show(world: World, output: OutputFormat, finished: Sequence[Finished]) -> None:
    """Objectives and verdicts; why a run did not pass goes to stderr."""
    from ftctl.app import report as complain

    if output.for_machines:
        runs: list[document.Document] = [
            {
                "name": run.name,
                "verdict": run.word,
                "code": int(run.code),
                "reason": run.reason,
                "seconds": round(run.seconds, 1),
                "slower": run.slower,
                "directory": str(run.directory),
                "objectives": [judging.document(judged) for judged in run.judged],
            }
            for run in finished
        ]
        document.emit(world, output, {"schema": document.SCHEMA, "runs": runs})
        return
    rows: list[tuple[str | Text, ...]] = []
    for run in finished:
        for judged in run.judged:
            measured = "-" if judged.measured is None else f"{judged.measured:.4g}"
            rows.append((run.name, judged.name, measured, _limit(judged), str(judged.count), _yes(judged.met)))
    if rows:
        heads = ("playbook", "objective", "measured", "limit", "count", "met")
        tables.show(world.console(), tables.table("objectives", heads, rows))
    verdicts: list[tuple[str | Text, ...]] = [
        (run.name, _styled(run.word, run.passed), f"{run.seconds:.0f} s", str(run.directory)) for run in finished
    ]
    tables.show(world.console(), tables.table("verdicts", ("playbook", "verdict", "took", "journal"), verdicts))
    if (slower := max((run.slower for run in finished), default=1.0)) > 1:
        world.say(f"this machine was up to {slower:g} times slower than the lab's pace; limits of times grew with it")
    for run in finished:
        if not run.passed:
            complain(world, CliError(run.name, run.reason or run.word, run.hint))


def _limit(judged: Judged) -> str:
    grown = judged.allowed != judged.limit
    return f"{judged.limit:g}, here {judged.allowed:.4g}" if grown else f"{judged.limit:g}"


def _yes(met: bool) -> Text:
    return _styled("yes" if met else "no", met)


def _styled(word: str, good: bool) -> Text:
    return Text(word, style=tables.GOOD if good else tables.BAD)
