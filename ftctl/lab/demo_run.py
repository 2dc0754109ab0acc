"""The demo from nothing to nothing: its own lab, the scenario, the judgement, the report, and the lab removed again."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from agents.api.models import JobAccount
from ftctl.context import World
from ftctl.errors import CliError
from ftctl.lab import analysis, lifecycle
from ftctl.lab.demo import Demo
from ftctl.lab.demo_judge import Mark, judge
from ftctl.lab.demo_report import Report
from ftctl.lab.interrupts import interruptible, uninterrupted
from ftctl.lab.journal import Journals, read_all
from ftctl.lab.layout import LabOptions
from ftctl.lab.lifecycle import Lab
from ftctl.lab.paths import ensure_private, state_dir, write_private
from ftctl.lab.processes import processes_of
from ftctl.lab.progress import Progress
from ftctl.lab.ready import connect, wait_until_training

REPLICAS, RAILS = 3, 2


@dataclass(frozen=True)
class Result:
    """`path`: the report on disk. `kept`: logs of a run that failed, or the lab's own directory with --keep."""

    report: Report
    path: Path | None
    kept: Path | None


def run(world: World, talk: Progress, *, rate: str, step_ms: int, seed: int, keep: bool) -> Result:
    """Raises CliError if no lab could be made, KeyboardInterrupt; nothing is left then."""
    begun = time.monotonic()
    options = LabOptions(
        name=f"demo-{os.getpid()}",
        replicas=REPLICAS,
        rails=RAILS,
        rate=rate,
        step_ms=step_ms,
        seed=seed,
        min_replicas=1,
    )
    with interruptible():
        lab = lifecycle.bring_up(
            options,
            lambda lab: world.run(wait_until_training(world, lab, talk.now)),
            progress=talk.now,
            announce=False,  # however this process ends, the keeper sees it and removes the lab
        )
        kept: Path | None = None
        report = Report()
        try:
            talk.done(f"lab {lab.name} is up: {REPLICAS} replicas train over {RAILS} rails each")
            report = _play(world, lab, talk)
            if keep:
                lab.announce()
                kept = lab.paths.root
            elif report.failures():
                kept = lifecycle.keep_logs(lab.paths)
        finally:
            if not keep:
                with uninterrupted():
                    report.left_behind = _remove(lab)
    talk.done("the lab is removed" if not keep else f"the lab is kept: ftctl lab down --name {lab.name}")
    report.seconds = time.monotonic() - begun
    return Result(report, _save(report), kept)


def _play(world: World, lab: Lab, talk: Progress) -> Report:
    marks: list[Mark] = []
    accounts: list[JobAccount] = []

    async def scenario() -> None:
        async with connect(world, lab) as agents:
            demo = Demo(world, lab, agents, talk)
            try:
                await demo.play()
            finally:
                marks.extend(demo.marks)
                accounts.extend([demo.account] if demo.account is not None else [])

    problems: list[str] = []
    try:
        world.run(scenario())
    except CliError as error:
        problems.append(str(error))
        talk.done(f"failed: {error}")
    report = assess(read_all(lab.paths.journal), marks, [node.replica for node in lab.nodes], problems)
    report.account = accounts[-1] if accounts else None
    return report


def assess(journals: Journals, marks: list[Mark], replicas: list[str], problems: list[str]) -> Report:
    """The report, but for what only the teardown can tell. Pure."""
    incidents, unmeasured = judge(journals, marks, replicas)
    first, last = analysis.losses(journals)
    ends = analysis.ends(journals, replicas)
    report = Report(
        incidents=incidents,
        steps=max((end.step for end in ends.values() if end is not None), default=0),
        loss_first=first,
        loss_last=last,
        parameters_identical=analysis.identical(ends),
        problems=[*problems, *unmeasured],
    )
    if marks:
        try:
            calm = analysis.calm_before(analysis.steps_of(journals, replicas), marks[0].start)
        except analysis.NotEnough:
            return report
        report.calm_wait_ms, report.calm_step_ms = calm.wait_s * 1000, calm.length_s * 1000
    return report


def _remove(lab: Lab) -> list[str]:
    """Take the lab down and look for anything of it that is still there."""
    try:
        left = lifecycle.take_down(lab.name)
    except CliError as error:
        return [str(error)]
    lab.forget_process()
    found = left.lines() if left is not None else []
    found += [f"process {process.pid} ({process.argv})" for process in processes_of(lab.manifest.uuid)]
    places = (lab.paths.root, Path(lab.manifest.runtime_dir))
    return list(dict.fromkeys(found + [str(path) for path in places if os.path.lexists(path)]))


def _save(report: Report) -> Path | None:
    path = state_dir() / "reports" / f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
    try:
        ensure_private(path.parent)
        write_private(path, json.dumps(report.document(), indent=2) + "\n")
    except OSError:
        return None
    return path
