"""Rank processes: what the agent that supervises one knows, beside what the rank itself reports."""

from __future__ import annotations

from rich.console import ConsoleRenderable
from rich.text import Text

from agents.api.models import ProcessView
from ftctl.client.ranks import RankRow, exit_word
from ftctl.durations import show
from ftctl.render.document import Document
from ftctl.render.status import milliseconds
from ftctl.render.tables import BAD, FAINT, GOOD, PASSING, Cell, replica_style, table

SILENT_S = 3.0  # ranks report at least every second


def parts(found: list[RankRow], *, one: bool) -> list[ConsoleRenderable]:
    """A row for each rank; for one replica also its links and logs."""
    if not found:
        return [Text("no ranks: no agent supervises one, and none has registered", style=FAINT)]
    answer: list[ConsoleRenderable] = [
        table(
            "",
            (
                "rank",
                "node",
                "pid",
                "process",
                "restarts",
                "state",
                "step",
                "epoch",
                "computes",
                "waits",
                "tokens/s",
                "last stall",
                "links",
            ),
            [_row(row) for row in found],
        )
    ]
    if one:
        links = [
            (
                f"{row.replica}.{row.rank}",
                f"{'to' if link.direction == 'out' else 'from'} {link.peer}",
                link.rail,
                Text(link.state + (" active" if link.active else ""), style=GOOD if link.state == "UP" else BAD),
                show(link.since_s),
                str(link.flaps),
                str(link.resumes),
                link.reason or "-",
            )
            for row in found
            if row.report
            for link in row.report.links
        ]
        if links:
            answer.append(table("", ("rank", "link", "rail", "state", "since", "flaps", "resumes", "reason"), links))
        logs = [(f"{r.replica}.{r.rank}", r.process.log) for r in found if r.process and r.process.log]
        if logs:
            answer.append(table("", ("rank", "log"), logs))
    return answer


def _row(row: RankRow) -> tuple[Cell, ...]:
    process, report = row.process, row.report
    pid = (process.pid if process else None) or (report.pid if report else None)
    if report is None:
        state: Cell = Text("not registered", style=FAINT)
        rest: tuple[Cell, ...] = ("-",) * 7
    else:
        silent = report.silent_s > SILENT_S
        word = f"{report.state}, silent for {show(report.silent_s)}" if silent else report.state
        state = Text(word, style=PASSING if silent else replica_style(report.state))
        up = sum(1 for link in report.links if link.state == "UP")
        total = len(report.links)
        rest = (
            str(report.step),
            f"{report.term}.{report.epoch}",
            milliseconds(report.compute_ms),
            milliseconds(report.wait_ms),
            f"{report.tokens_per_s:.0f}",
            milliseconds(report.last_stall_ms) if report.last_stall_ms else "-",
            Text(f"{up}/{total} up", style=GOOD if up == total else PASSING) if total else "-",
        )
    return (
        f"{row.replica}.{row.rank}",
        row.node,
        str(pid) if pid else "-",
        _process(process),
        str(process.restarts) if process else "-",
        state,
        *rest,
    )


def _process(process: ProcessView | None) -> Cell:
    if process is None:
        return Text("not supervised", style=FAINT)
    text = process.state
    if process.state == "running":
        return Text(text, style=GOOD)
    if process.exit_code is not None:
        text += f", {exit_word(process.exit_code)}"
    if process.next_start_s is not None:
        text += f", starts in {show(max(0.0, process.next_start_s))}"
    return Text(text, style=BAD if process.state == "failed" else PASSING)


def document(row: RankRow) -> Document:
    return {
        "replica": row.replica,
        "rank": row.rank,
        "node": row.node,
        "process": row.process.model_dump(mode="json") if row.process else None,
        "report": row.report.model_dump(mode="json") if row.report else None,
    }
