"""The verdict on a run: what its incidents cost, against the playbook's objectives."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ftctl.client.cluster import Agents
from ftctl.errors import CliError
from ftctl.exit_codes import ExitCode
from ftctl.lab import analysis, traffic
from ftctl.lab.journal import Journals, read_all
from ftctl.lab.layout import NCCL
from ftctl.lab.lifecycle import Lab
from ftctl.playbook import judging, measuring
from ftctl.playbook.engine import ENDINGS, Result
from ftctl.playbook.journal import Journal
from ftctl.playbook.measuring import Cost
from ftctl.playbook.schema import Playbook

SETTLE_S = 0.5  # for the last lines of the replicas' journals


@dataclass(frozen=True)
class Finished:
    """A playbook that was run, judged. `word`: passed, missed (an objective), or one of engine.ENDINGS."""

    name: str
    directory: Path
    word: str
    code: ExitCode
    reason: str
    hint: str
    judged: list[judging.Judged] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    seconds: float = 0.0
    slower: float = 1.0  # than its pace was the machine, by so many times (ftctl/playbook/pace.py)

    @property
    def passed(self) -> bool:
        return self.word == "passed"


async def judge_run(playbook: Playbook, result: Result, agents: Agents, journal: Journal, lab: Lab | None) -> Finished:
    directory = journal.path.parent
    windows = measuring.windows(journal.records)
    whole: dict[str, float | None] = {}
    why_not: dict[str, str] = {}
    if lab is not None:
        time.sleep(SETTLE_S)  # noqa: ASYNC251 - nothing else is to be done meanwhile
        journals = read_all(lab.paths.journal)
        names = sorted(journals.by_replica)
        costs = [measuring.from_journals(journals, window, names) for window in windows]
        whole["loss_delta"] = _loss_delta(journals, result)
        _keep(lab, directory)
    else:
        stalls = []
        with suppress(CliError):
            known = result.stalls_before
            stalls = [s for s in (await agents.any_agent(lambda client: client.job())).stalls if s not in known]
        costs = [measuring.from_stalls(stalls, window) for window in windows]
        why_not["loss_delta"] = "only the replicas' journals tell, and they are not on this machine"
    events = [record["event"] for record in journal.records if record["kind"] == "event"]
    whole["diverged"] = float(sum(event["kind"] in ("replica.diverged", "job.diverged") for event in events))
    whole["effective_time"], why = _effective(journal)
    if why:
        why_not["effective_time"] = why
    whole["bytes_corrupted"], why_not["bytes_corrupted"] = _corrupted(lab)
    slower = result.pace.slower
    judged = judging.judge(playbook.objectives, costs, whole=whole, why_not=why_not, slower=slower)
    ended = result.ended
    if ended.how != "completed":
        return Finished(
            *(playbook.name, directory, ended.how, ENDINGS[ended.how], ended.reason, ended.hint, judged, costs),
            slower=slower,
        )
    missed = [objective for objective in judged if not objective.met]
    if missed:
        said = "; ".join(_missed(objective) for objective in missed)
        return Finished(playbook.name, directory, "missed", ExitCode.FAILED, said, "", judged, costs, slower=slower)
    return Finished(playbook.name, directory, "passed", ExitCode.OK, "", "", judged, costs, slower=slower)


def _corrupted(lab: Lab | None) -> tuple[float | None, str]:
    if lab is None or lab.manifest.options.job != NCCL:
        return None, "only the ranks of a lab with job: nccl check every byte"
    found = dict(traffic.reports(lab.paths))
    silent = [node.name for node in lab.nodes if node.name not in found or not found[node.name].bytes_checked]
    if silent:
        return None, f"the rank of {', '.join(silent)} has checked nothing"
    return float(sum(one.bytes_wrong for one in found.values())), ""


def _missed(judged: judging.Judged) -> str:
    if judged.measured is None or judged.reason:
        return f"{judged.name}: {judged.reason or 'not measured'}"
    others = f" on a machine as slow as this one today ({judged.limit:g} on others)"
    slower = others if judged.allowed != judged.limit else ""
    return f"{judged.name}: {judged.measured:.4g}, and {judged.allowed:.4g} is the limit{slower}"


def _effective(journal: Journal) -> tuple[float | None, str]:
    """The share of the time that went into training, by the coordinator's own account, over the method."""
    shares = [r["effective"] for r in journal.records if r["kind"] == "sample" and r.get("effective") is not None]
    if len(shares) < 2:
        return None, "this coordinator keeps no account of its time"
    (total0, good0), (total1, good1) = shares[0], shares[-1]
    return ((good1 - good0) / (total1 - total0), "") if total1 > total0 else (None, "no step was committed")


def _loss_delta(journals: Journals, result: Result) -> float | None:
    if result.method_time is None:
        return None
    start, end = result.method_time
    first: list[float] = []
    last: list[float] = []
    for name in journals.by_replica:
        lines = [line for line in analysis.step_lines(journals, name) if start <= (line.t_commit or 0.0) <= end]
        found = [line.loss for line in lines if line.loss is not None]
        first += found[:5]
        last += found[-5:]
    return sum(last) / len(last) - sum(first) / len(first) if first else None


def _keep(lab: Lab, directory: Path) -> None:
    """The replicas' own journals are evidence: beside the run's."""
    with suppress(OSError):
        shutil.copytree(lab.paths.journal, directory / "replicas", dirs_exist_ok=True)


def cost_document(cost: Cost) -> dict[str, object]:
    return {
        "incident": cost.incident,
        "what": cost.what,
        "aim": cost.aim,
        "repeat": cost.repeat,
        "detect_ms": cost.detect_ms,
        "stall_ms": cost.stall_ms,
        "rejoin_s": cost.rejoin_s,
        "steps_lost": cost.steps_lost,
        "missing": cost.missing,
    }
