"""`ftctl status` for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import ConsoleRenderable
from rich.text import Text

from agents.api.models import FaultView, JobState, NicView, NodeView
from ftctl.client import links, protection
from ftctl.client.cluster import NodeAnswer, Snapshot
from ftctl.client.problems import Problem, fault_on, is_bad, rail_word, recommend
from ftctl.durations import show
from ftctl.render import accounting, document
from ftctl.render import links as link_view
from ftctl.render.tables import BAD, FAINT, GOOD, PASSING, Cell, Items, fault_style, job_style, replica_style, table

RECENT_STALLS = 5


def status(
    snapshot: Snapshot, problems: list[Problem], *, wide: bool = False, every: bool = False
) -> list[ConsoleRenderable]:
    """The parts, top down. `wide` adds columns, `every` adds all NICs, all stalls and reverted faults."""
    parts: list[ConsoleRenderable] = [
        job_line(snapshot),
        table("", _NODE_COLUMNS_WIDE if wide else _NODE_COLUMNS, [_node(a, wide, every) for a in snapshot.nodes]),
    ]
    replicas = list(_replicas(snapshot, wide))
    processes = link_view.processes(snapshot)
    if replicas or processes is None:
        parts.append(
            table("", (*_REPLICA_COLUMNS[:-1], *_PACE_COLUMNS, "reason") if wide else _REPLICA_COLUMNS, replicas)
        )
    if processes is not None:
        parts.append(processes)
    # A join that nobody waited for is no stall; the events have it.
    stalls = [s for s in snapshot.job.stalls if every or s.stall_ms is not None] if snapshot.job else []
    if stalls:
        parts.append(
            table(
                "",
                ("stall", "ago", "of", "step", "detected", "stalled", "reason"),
                [
                    (
                        s.kind,
                        show(max(0.0, snapshot.time - s.time)),
                        s.replica,
                        str(s.step),
                        milliseconds(s.detect_ms),
                        milliseconds(s.stall_ms),
                        s.reason,
                    )
                    for s in (stalls if every else stalls[-RECENT_STALLS:])
                ],
            )
        )
    if wide and snapshot.job is not None and snapshot.job.accounting is not None:
        parts += accounting.parts(snapshot.job.accounting)[1:]
    faults = [f for f in snapshot.faults() if every or not f.state.over]
    if faults:
        parts.append(fault_table(faults))
    parts.append(advice(problems))
    return parts


def problems_only(problems: list[Problem]) -> list[ConsoleRenderable]:
    if not problems:
        return [Text("no problems", style=GOOD)]
    rows: list[tuple[Cell, ...]] = [
        (Text(p.object, style=PASSING if p.expected else BAD), p.reason, p.action or "-") for p in problems
    ]
    return [table("", ("object", "reason", "action"), rows)]


def advice(problems: list[Problem]) -> ConsoleRenderable:
    """The problems in a line each, and the one action recommended first."""
    if not problems:
        return Text("healthy: nothing to do", style=GOOD)
    text = Text()
    for p in problems:
        text.append(f"{p.object}: ", style=PASSING if p.expected else BAD)
        text.append(f"{p.reason}\n")
    first = recommend(problems)
    if first is None:
        text.append("nothing to do: wait", style=FAINT)
    else:
        text.append("recommended: ", style="bold")
        text.append(f"{first.action}   (because of {first.object})")
    return text


def job_line(snapshot: Snapshot) -> ConsoleRenderable:
    job = snapshot.job
    text = Text(f"job {snapshot.job_name}  ", style="bold")
    word = document.without_coordinator(snapshot)
    if job is None and word in document.REASONS:
        text.append(word, style=job_style(word))
        text.append(f"  {document.REASONS[word]}", style="not bold")
        return text
    if job is None:
        text.append("unknown", style=BAD)
        text.append(f"  {snapshot.job_error}", style="not bold")
        return text
    text.append(job.state, style=job_style(job.state))
    pace = f"  {job.step_ms_median:.0f} ms a step" if job.step_ms_median is not None else ""
    text.append(
        f"  step {job.step}  epoch {job.term}.{job.epoch}{pace}  contributors {' '.join(job.contributors) or 'none'}"
        f" ({len(job.contributors)} of {job.replicas_wanted}, at least {job.min_replicas}){_spares(job)}",
        style="not bold",
    )
    text.append_text(_checkpoint(job, snapshot.time))
    if job.accounting is not None:
        text.append("\n")
        text.append_text(accounting.line(job.accounting))
    if job.reason:
        text.append(f"\n{job.reason}", style="not bold")
    return text


def _checkpoint(job: JobState, now: float) -> Text:
    """The newest one; on a line of its own why the one after it is not there."""
    kept, text = job.checkpoint, Text()
    if kept.step:
        about = f", {kept.bytes / 1e6:.1f} MB, {show(max(0.0, now - kept.time))} ago" if kept.time else ""
        text.append(f"  checkpoint step {kept.step}{about}", style="not bold")
    if kept.failed_step and kept.failed_time >= kept.time:
        ago = show(max(0.0, now - kept.failed_time))
        text.append(f"\nno checkpoint of step {kept.failed_step}, {ago} ago: {kept.failed}", style=BAD)
    return text


def _spares(job: JobState) -> str:
    ready = [replica.name for replica in job.replicas if replica.state == "spare"]
    if not ready and not job.spares_wanted:
        return ""
    return f"  spares {' '.join(ready) or 'none'}" + (
        f" ({len(ready)} of {job.spares_wanted})" if job.spares_wanted else ""
    )


_NODE_COLUMNS = ("node", "agent", "gpus", "faults", "rails")
_NODE_COLUMNS_WIDE = ("node", "agent", "memory", "cpu", "gpus", "faults", "rails")


def _node(answer: NodeAnswer, wide: bool, every: bool) -> tuple[Cell, ...]:
    view = answer.view
    if view is None:
        blank = ("-",) * (len(_NODE_COLUMNS_WIDE if wide else _NODE_COLUMNS) - 3)
        reason = answer.error.reason if answer.error else "no answer"
        return (Text(answer.name), Text("unreachable", style=BAD), *blank, Text(reason, style=BAD))
    agent = Text(f"pid {view.agent.pid}, {show(view.agent.age_s)}")
    if view.cordon is not None:
        agent.append(", ").append("cordoned", style=PASSING)
    if protection.of_node(view):
        agent.append(", ").append("protected", style=GOOD)
    extra = (f"{view.agent.rss_mb:.0f} MB", f"{view.agent.cpu_percent:.1f} %") if wide else ()
    count = sum(1 for f in view.faults if not f.state.over)
    faults = Text(str(count), style=PASSING) if count else Text("-")
    rails = [rail(view, nic, wide=wide) for nic in view.nics if nic.role == "rail" or every]
    shown: Cell = Text("\n").join(rails) if wide else Items(rails)
    return (view.name, agent, *extra, _gpus(view), faults, shown if rails else Text("none declared", style=FAINT))


def _gpus(view: NodeView) -> Cell:
    devices = view.gpus.devices
    if not devices:
        return Text(view.gpus.note or "none", style=FAINT)
    bad = [gpu for gpu in devices if gpu.state.value in ("degraded", "unhealthy")]
    count = f"{len(devices)} simulated" if view.gpus.simulated else str(len(devices))
    if view.gpus.note:  # the probe hangs, or some are missing
        return Text(f"{count}: {view.gpus.note}", style=BAD)
    return Text(f"{count}, {len(bad)} bad", style=BAD) if bad else Text(count, style=GOOD)


def rail(view: NodeView, nic: NicView, *, wide: bool) -> Text:
    """`rail0 up 10G active`, in yellow when it is down on purpose."""
    word = rail_word(nic)
    injected = nic.injected or fault_on(view.faults, f"{view.name}/{nic.name}") is not None
    text = Text(f"{nic.name} ")
    if is_bad(nic):
        text.append(f"{word} (injected)" if injected else word, style=PASSING if injected else BAD)
    else:
        text.append(word, style=GOOD)
    if nic.speed_mbit:
        text.append(f" {speed(nic.speed_mbit)}")
    if document.is_active(view, nic):
        text.append(" active")
    if protection.of_nic(view, nic.name) and not protection.of_node(view):
        text.append(" protected")
    if said := links.sentence(links.over(view, nic)):
        text.append(f" {said}")
    if wide:
        text.append(f"  {' '.join(nic.addresses) or 'no address'}  changes {nic.carrier_changes}", style=FAINT)
        text.append(f"  rx {link_view.size(nic.rx_bytes)} tx {link_view.size(nic.tx_bytes)}", style=FAINT)
        text.append(f"  errors {nic.rx_errors + nic.tx_errors} dropped {nic.rx_dropped + nic.tx_dropped}", style=FAINT)
        for link in document.links_over(view, nic):
            text.append(f"\n  {link.direction} {link.peer}: {link.state}, {link.reason}", style=FAINT)
    return text


_REPLICA_COLUMNS = ("replica", "state", "step", "nodes", "loss", "heartbeat", "since", "reason")
_PACE_COLUMNS = ("computes", "waits", "pace")  # wide: before the reason


def _pace(row: document.Document) -> tuple[Cell, ...]:
    """`210 ms`, `4 ms`, `1.8 x` (of the median of the others)."""
    compute, wait, pace = row["compute_ms"], row["wait_ms"], row["pace"]
    return (
        milliseconds(compute) if isinstance(compute, float) else "-",
        milliseconds(wait) if isinstance(wait, float) else "-",
        Text(f"{pace:.1f} x", style=PASSING if row["straggler"] else "") if isinstance(pace, float) else "-",
    )


def _replicas(snapshot: Snapshot, wide: bool) -> Iterator[tuple[Cell, ...]]:
    for r in document.replicas(snapshot):
        state, nodes, since, loss, beat = str(r["state"]), r["nodes"], r["since"], r["loss"], r["heartbeat_age_ms"]
        yield (
            str(r["name"]),
            Text(state, style=replica_style(state)),
            str(r["step"]),
            " ".join(map(str, nodes)) if isinstance(nodes, list) else "",
            f"{loss:.4f}" if isinstance(loss, float) else "-",
            f"{milliseconds(beat)} ago" if isinstance(beat, float) else "-",
            show(max(0.0, snapshot.time - since)) if isinstance(since, float | int) else "-",
            *(_pace(r) if wide else ()),
            str(r["reason"])
            + ("; a straggler: the others wait for it" if r["straggler"] else "")
            + ("; its results differ from the others'" if r["diverged"] else "")
            + ("; protected: no fault may hit it" if r["protected"] else ""),
        )


def fault_table(faults: list[FaultView]) -> ConsoleRenderable:
    rows: list[tuple[Cell, ...]] = [
        (
            f.id,
            f.kind,
            f.target,
            Text(f.state.value, style=fault_style(f.state.value)),
            "-" if f.state.over else show(max(0.0, f.ttl_left_s)),
            f.owner,
            "; ".join(part for part in (f.reason, f.detail) if part) or "-",
        )
        for f in faults
    ]
    return table("", ("fault", "kind", "target", "state", "left", "owner", "reason"), rows)


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def speed(mbit: int) -> str:
    return f"{mbit / 1000:g}G" if mbit >= 1000 else f"{mbit}M"
