"""Runs playbooks one after the other, on a cluster that is there or in a lab of their own, and judges each."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ftctl.client.cluster import Agents, Cluster
from ftctl.context import World
from ftctl.errors import CliError, UsageProblem
from ftctl.exit_codes import ExitCode, most_urgent
from ftctl.lab import lifecycle
from ftctl.lab.interrupts import interruptible, uninterrupted
from ftctl.lab.layout import LabOptions
from ftctl.lab.lifecycle import Lab
from ftctl.lab.paths import UnsafeDirectory, ensure_private, state_dir
from ftctl.lab.progress import Progress
from ftctl.lab.ready import connect, wait_until_training
from ftctl.playbook import engine, judging
from ftctl.playbook.engine import ENDINGS
from ftctl.playbook.journal import SCHEMA, Journal, JournalError
from ftctl.playbook.pace import Pace
from ftctl.playbook.reading import Loaded
from ftctl.playbook.schema import Playbook
from ftctl.playbook.verdict import Finished, cost_document, judge_run

LAB = "lab"  # the environment of a lab
LABS_LOST = 3  # that did not come up, one after the other: the next one would not either


@dataclass(frozen=True)
class Stage:
    """What the runs of one command share. `lab` None: a cluster that was there before."""

    world: World
    out: Path | None
    seed: int
    environment: str
    talk: Progress
    lab: Lab | None = None


def overall(runs: Sequence[Finished]) -> ExitCode:
    return most_urgent(run.code for run in runs)


def runs_dir() -> Path:
    return state_dir() / "chaos"


def on_cluster(
    cluster: Cluster, books: Sequence[Loaded], out: Path | None, seed: int, talk: Progress, *, finished: list[Finished]
) -> None:
    """Each run is in `finished` when it is over. Raises CliError when nothing could be begun."""
    stage = Stage(cluster.world, out, seed, cluster.inventory.environment, talk)
    with _alone(cluster.inventory.job):
        for book in books:

            async def session(agents: Agents, book: Loaded = book) -> Finished:
                return await _one(stage, book, agents)

            finished.append(cluster.run(session))
            talk.done(f"{book.name}: {finished[-1].word}")
            if finished[-1].code in (ExitCode.INTERRUPTED, ExitCode.IN_FORCE):
                break


def in_labs(
    world: World, books: Sequence[Loaded], out: Path | None, seed: int, talk: Progress, *, finished: list[Finished]
) -> None:
    """Playbooks of the same lab share one (`_same`), as long as all goes well in it, and so run one after the other;
    each is in `finished` when it is over. The labs go when this process does. Raises CliError."""
    lab: Lab | None = None
    options: LabOptions | None = None
    without = 0
    try:
        with interruptible():
            for number, book in enumerate(by_lab(books)):
                wanted = lab_options(book.playbook, f"chaos-{os.getpid()}-{number}")
                if lab is None or options is None or not _same(options, wanted):
                    _remove(lab)
                    lab = None
                    talk.now(f"{book.name}: making a lab")
                    try:
                        lab = lifecycle.bring_up(
                            wanted,
                            lambda new: world.run(wait_until_training(world, new, talk.now)),
                            progress=talk.now,
                            announce=False,
                        )
                    except CliError as error:  # the other playbooks, and the reports, are worth having
                        if isinstance(error, UsageProblem) or error.code is not ExitCode.FAILED:
                            raise
                        finished.append(_without_lab(Stage(world, out, seed, LAB, talk), book, error))
                        talk.done(f"{book.name}: {finished[-1].word}: {error}")
                        without += 1
                        if without == LABS_LOST:
                            break
                        continue
                    without = 0
                    options = wanted
                    talk.done(f"lab {lab.name} is up")
                stage = Stage(world, out, seed, LAB, talk, lab)

                async def session(book: Loaded = book, stage: Stage = stage, lab: Lab = lab) -> Finished:
                    async with connect(world, lab) as agents:
                        return await _one(stage, book, agents)

                finished.append(world.run(session()))
                talk.done(f"{book.name}: {finished[-1].word}")
                if finished[-1].code is ExitCode.INTERRUPTED:
                    break
                if finished[-1].word not in ("passed", "missed"):  # the lab may not be what it was
                    kept = lifecycle.keep_logs(lab.paths)
                    if kept is not None:
                        talk.done(f"logs of {lab.name}: {kept}")
                    _remove(lab)
                    lab = None
    finally:
        _remove(lab)


def lab_options(playbook: Playbook, name: str) -> LabOptions:
    return LabOptions(name=name, **playbook.lab.model_dump())


def by_lab(books: Sequence[Loaded]) -> list[Loaded]:
    """In their order, but those of the same lab beside each other: making a lab takes longer than most playbooks."""
    groups: dict[str, list[Loaded]] = {}
    for book in books:
        groups.setdefault(book.playbook.lab.model_dump_json(), []).append(book)
    return [book for group in groups.values() for book in group]


def _same(one: LabOptions, other: LabOptions) -> bool:
    """A lab whose agents act by a policy is nobody else's: they remember what they did, and stop after so many acts."""
    return not (other.policy or other.gpus) and {**_fields(one), "name": ""} == {**_fields(other), "name": ""}


def _fields(options: LabOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in options.__struct_fields__}


def _remove(lab: Lab | None) -> None:
    if lab is None:
        return
    with uninterrupted():
        left = lifecycle.take_down(lab.name)
        lab.forget_process()
    if left is not None and left.lines():
        raise CliError(
            f"lab {lab.name}", f"still there: {'; '.join(left.lines())}", f"ftctl lab down --name {lab.name}"
        )


async def _one(stage: Stage, book: Loaded, agents: Agents) -> Finished:
    """Play one playbook and judge it."""
    world, lab = stage.world, stage.lab
    directory = _directory(world, stage.out, book.name)
    begun = world.monotonic()
    journal = Journal(directory / "journal.jsonl", lambda: (world.unix_time(), world.monotonic()))
    with ExitStack() as stack:
        stack.callback(journal.close)
        playbook = book.playbook
        _begin(journal, stage, book, agents.inventory.job, in_lab=lab is not None)

        def say(text: str) -> None:
            stage.talk.now(f"{playbook.name}: {text}")

        result = await engine.play(
            playbook,
            agents,
            journal,
            seed=stage.seed,
            environment=stage.environment,
            say=say,
            pace=Pace(playbook.lab.step_ms if lab is not None else None),
            file=str(book.path),
        )
        finished = await judge_run(playbook, result, agents, journal, stage.lab)
        finished = replace(finished, seconds=world.monotonic() - begun)
        with suppress(JournalError):
            for cost in finished.costs:
                journal.write("measured", **cost_document(cost))
            _end(journal, finished)
    return finished


def _without_lab(stage: Stage, book: Loaded, error: CliError) -> Finished:
    """The run of a playbook whose lab did not come up: nothing was injected, and the reports say why."""
    directory = _directory(stage.world, stage.out, book.name)
    word = "no-steady-state"
    finished = Finished(book.name, directory, word, ENDINGS[word], str(error), error.hint)
    journal = Journal(directory / "journal.jsonl", lambda: (stage.world.unix_time(), stage.world.monotonic()))
    with closing(journal):
        _begin(journal, stage, book, "", in_lab=True)
        _end(journal, finished)
    return finished


def _begin(journal: Journal, stage: Stage, book: Loaded, job: str, *, in_lab: bool) -> None:
    playbook = book.playbook
    journal.write(
        "run",
        schema=SCHEMA,
        name=playbook.name,
        description=playbook.description,
        tags=playbook.tags,
        file=str(book.path),
        seed=stage.seed,
        environment=stage.environment,
        job=job,
        repeat=playbook.repeat,
        vars=playbook.vars,
        lab=playbook.lab.model_dump() if in_lab else None,
    )
    with suppress(OSError):
        shutil.copy(book.path, journal.path.parent / "playbook.yaml")


def _end(journal: Journal, finished: Finished) -> None:
    journal.write(
        "verdict",
        passed=finished.passed,
        word=finished.word,
        code=int(finished.code),
        reason=finished.reason,
        hint=finished.hint,
        seconds=round(finished.seconds, 3),
        slower=finished.slower,
        objectives=[judging.document(judged) for judged in finished.judged],
    )


def _directory(world: World, out: Path | None, name: str) -> Path:
    """A new directory for a run: STAMP-NAME. Raises CliError."""
    parent = out if out is not None else runs_dir()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(world.unix_time()))
    try:
        if out is None:
            ensure_private(parent)
        else:
            parent.mkdir(parents=True, exist_ok=True)
        for number in range(1000):
            path = parent / f"{stamp}-{re.sub('[^a-z0-9._-]', '-', name)}{f'-{number}' if number else ''}"
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except UnsafeDirectory as error:
        raise UsageProblem(str(parent), str(error), "--out DIR puts it elsewhere") from None
    except OSError as error:
        raise CliError(str(parent), error.strerror or str(error), "--out DIR puts it elsewhere") from None
    raise CliError(str(parent), "too many runs of this second")


@contextmanager
def _alone(job: str) -> Iterator[None]:
    """One controller a job and user at a time: two would take each other's faults for the cluster's."""
    try:
        ensure_private(runs_dir())
        handle = os.open(
            runs_dir() / f".lock-{re.sub('[^a-z0-9._-]', '-', job)}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
    except (OSError, UnsafeDirectory) as error:
        raise CliError(str(runs_dir()), str(error), "FTCTL_STATE_DIR moves it elsewhere") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise CliError(
            f"job {job}", "another `ftctl chaos run` of yours is at it", "wait for it", ExitCode.REFUSED
        ) from None
    try:
        yield
    finally:
        os.close(handle)
