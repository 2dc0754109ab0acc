"""The answers of ftctl as JSON or YAML documents. Every document has `schema`; within a number, keys are only added."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from typing import Union

from agents.api.models import FaultView, JobAccount, JobState, LinkView, NicView, NodeView, RankView
from ftctl.client import links, protection
from ftctl.client.cluster import NodeAnswer, Snapshot
from ftctl.client.problems import Problem, fault_on, rail_word, recommend
from ftctl.context import World
from ftctl.options import OutputFormat

Json = Union[None, bool, int, float, str, Sequence["Json"], Mapping[str, "Json"]]  # noqa: UP007 - recursive
Document = dict[str, Json]
SCHEMA = 1


def emit(world: World, output: OutputFormat, document: Document) -> None:
    """Print a document on stdout, JSON on one line when `output` is JSON and stdout is no terminal."""
    world.out(as_text(output, document))


def as_text(output: OutputFormat, document: Document) -> str:
    if output is OutputFormat.YAML:
        from ruamel.yaml import YAML

        yaml = YAML(typ="safe")
        yaml.default_flow_style = False
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
        stream = io.StringIO()
        yaml.dump(json.loads(json.dumps(document)), stream)
        return "---\n" + stream.getvalue().rstrip("\n")
    return json.dumps(document, indent=2, allow_nan=False)


def as_line(document: Document) -> str:
    """A document on one line, for streams (JSON lines)."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def status(snapshot: Snapshot, problems: list[Problem]) -> Document:
    """`ftctl status -o json`."""
    advice = recommend(problems)
    return {
        "schema": SCHEMA,
        "time": snapshot.time,
        "job": job(snapshot),
        "nodes": [_node(answer) for answer in snapshot.nodes],
        "replicas": replicas(snapshot),
        "stalls": [stall.model_dump(mode="json") for stall in snapshot.job.stalls] if snapshot.job else [],
        "faults": [fault(f) for f in snapshot.faults() if not f.state.over],
        "problems": [problem(p) for p in problems],
        "recommended": {"action": advice.action, "reason": f"{advice.object}: {advice.reason}"} if advice else None,
    }


FINISHED = "every replica ended after the last commit, and so did the coordinator"
UNCOORDINATED = "no coordinator: its processes run NCCL over links that are watched here"
REASONS = {"finished": FINISHED, "uncoordinated": UNCOORDINATED}


def without_coordinator(snapshot: Snapshot) -> str:
    """The state of a job that no coordinator speaks for: finished, uncoordinated (it needs none) or unknown."""
    if snapshot.finished():
        return "finished"
    return "uncoordinated" if snapshot.needs_no_coordinator() else "unknown"


def job(snapshot: Snapshot) -> Document:
    """The coordinator's view; without a coordinator, what the ranks last reported to their agents."""
    state = snapshot.job
    if state is not None:
        return {
            "name": state.name,
            "state": state.state,
            "reason": state.reason,
            "step": state.step,
            "term": state.term,
            "epoch": state.epoch,
            "contributors": list(state.contributors),
            "replicas_wanted": state.replicas_wanted,
            "spares": [replica.name for replica in state.replicas if replica.state == "spare"],
            "spares_wanted": state.spares_wanted,
            "min_replicas": state.min_replicas,
            "step_ms_median": state.step_ms_median,
            "checkpoint": _checkpoint(snapshot, state),
            "coordinator": {"pid": state.pid, "age_s": _age(snapshot, state)},
            "settings": dict(state.settings),
            "accounting": account(state.accounting),
        }
    newest = max(_ranks(snapshot), key=lambda rank: (rank.term, rank.epoch, rank.step), default=None)
    return {
        "name": snapshot.job_name,
        "state": without_coordinator(snapshot),
        "reason": REASONS.get(without_coordinator(snapshot), str(snapshot.job_error or "")),
        "step": newest.step if newest else None,
        "term": newest.term if newest else None,
        "epoch": newest.epoch if newest else None,
        "contributors": list(newest.contributors) if newest else [],
        "replicas_wanted": None,
        "spares": [],
        "spares_wanted": None,
        "min_replicas": None,
        "step_ms_median": None,
        "checkpoint": None,
        "coordinator": None,
        "settings": {},
        "accounting": None,
    }


def account(state: JobAccount | None) -> Document | None:
    """Where the job's time went: `us` of all entries are `total_us`, exactly; `share` is of that."""
    if state is None:
        return None
    return {
        "since": state.since,
        "total_us": state.total_us,
        "effective": state.effective,
        "calm_us": state.calm_us,
        "spent": [
            {**entry.model_dump(mode="json"), "share": entry.us / state.total_us if state.total_us else None}
            for entry in state.spent
        ],
        "late": state.late.model_dump(mode="json") if state.late is not None else None,
    }


def _checkpoint(snapshot: Snapshot, state: JobState) -> Document | None:
    """`failed` is the newest that could not be written, also if a newer one is complete."""
    kept = state.checkpoint
    if not kept.step and not kept.failed_step:
        return None

    def age(time: float) -> float | None:
        return round(max(0.0, snapshot.time - time), 3) if time else None

    failed = {"step": kept.failed_step, "age_s": age(kept.failed_time), "reason": kept.failed}
    return {
        "step": kept.step or None,
        "age_s": age(kept.time),
        "bytes": kept.bytes if kept.time else None,
        "write_s": kept.seconds if kept.time else None,
        "failures": kept.failures,
        "failed": failed if kept.failed_step else None,
    }


def _age(snapshot: Snapshot, state: JobState) -> float | None:
    return round(max(0.0, snapshot.time - state.started), 3) if state.started else None


def _ranks(snapshot: Snapshot) -> list[RankView]:
    return [rank for view in snapshot.views() for rank in view.ranks if rank.job == snapshot.job_name]


def replicas(snapshot: Snapshot) -> list[Document]:
    if snapshot.job is not None:
        return [
            {
                "name": r.name,
                "state": r.state,
                "step": r.step,
                "nodes": list(r.nodes),
                "reason": r.reason,
                "since": r.since,
                "incarnation": r.incarnation,
                "slot": r.slot,
                "loss": r.loss,
                "step_ms": r.step_ms,
                "compute_ms": r.compute_ms,
                "wait_ms": r.wait_ms,
                "pace": r.pace,
                "straggler": r.straggler,
                "diverged": r.diverged,
                "phase": r.phase,
                "heartbeat_age_ms": r.heartbeat_age_ms,
                "protected": protection.of_replica(snapshot, r.name),
            }
            for r in snapshot.job.replicas
        ]
    found: dict[str, list[RankView]] = {}
    for rank in _ranks(snapshot):
        found.setdefault(rank.replica, []).append(rank)
    return [
        {
            "name": name,
            "state": ranks[0].state,
            "step": min(rank.step for rank in ranks),
            "nodes": sorted({rank.node for rank in ranks}),
            "reason": "as its ranks report it: the coordinator cannot be asked",
            "since": None,
            "incarnation": None,
            "slot": None,
            "loss": ranks[0].loss,
            "step_ms": None,
            "compute_ms": ranks[0].compute_ms,
            "wait_ms": ranks[0].wait_ms,
            "pace": None,
            "straggler": False,
            "diverged": "",
            "phase": "",
            "heartbeat_age_ms": None,
            "protected": protection.of_replica(snapshot, name),
        }
        for name, ranks in sorted(found.items())
    ]


def _node(answer: NodeAnswer) -> Document:
    view = answer.view
    if view is None:
        return {
            "name": answer.name,
            "agent": None,
            "error": str(answer.error or ""),
            "cordon": None,
            "halt": None,
            "protected": "",
            "protect": [],
            "blast_radius": None,
            "rails": [],
            "gpus": [],
            "gpu_note": "",
            "ranks": [],
            "processes": [],
            "link_processes": [],
        }
    return {
        "name": answer.name,
        "agent": view.agent.model_dump(mode="json"),
        "error": "",
        "cordon": view.cordon.model_dump(mode="json") if view.cordon is not None else None,
        "halt": view.halt.model_dump(mode="json") if view.halt is not None else None,
        "protected": protection.of_node(view),
        "protect": [rules.model_dump(mode="json") for rules in view.protect],
        "blast_radius": view.blast.model_dump(mode="json") if view.blast is not None else None,
        "rails": [_rail(view, nic) for nic in view.nics if nic.role == "rail"],
        "nics": [nic.model_dump(mode="json") for nic in view.nics if nic.role != "rail"],
        "gpus": [gpu.model_dump(mode="json") for gpu in view.gpus.devices],
        "gpu_note": view.gpus.note,
        "ranks": [rank.model_dump(mode="json") for rank in view.ranks],
        "processes": [process.model_dump(mode="json") for process in view.processes],
        "link_processes": [process.model_dump(mode="json") for process in view.link_processes],
    }


def _rail(view: NodeView, nic: NicView) -> Document:
    cause = fault_on(view.faults, f"{view.name}/{nic.name}")
    return {
        **nic.model_dump(mode="json"),
        "word": rail_word(nic),
        "active": is_active(view, nic),
        "links": dataclasses.asdict(links.over(view, nic)),
        "injected": nic.injected or cause is not None,
        "fault": cause.id if cause else None,
        "protected": protection.of_nic(view, nic.name),
    }


def is_active(view: NodeView, nic: NicView) -> bool:
    """True when a link of some process here carries its data over this rail now."""
    return links.over(view, nic).active > 0


def links_over(view: NodeView, nic: NicView) -> list[LinkView]:
    return [link for rank in view.ranks for link in rank.links if link.rail == nic.name]


def fault(f: FaultView) -> Document:
    return {
        "id": f.id,
        "kind": f.kind,
        "target": f.target,
        "state": f.state.value,
        "ttl_left_s": round(f.ttl_left_s, 3),
        "owner": f.owner,
        "node": f.node,
        "reason": f.reason,
        "detail": f.detail,
        "created": f.created,
        "duration_s": f.duration_s,
        "irreversible": f.irreversible,
        "warning": f.warning,
        "undo": list(f.undo),
        "params": dict(f.params),
    }


def problem(p: Problem) -> Document:
    return {"object": p.object, "reason": p.reason, "action": p.action, "expected": p.expected}
