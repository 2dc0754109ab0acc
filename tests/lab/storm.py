"""A storm over a lab: replicas, their ranks, rails, agents and the coordinator fail in any order while a job trains.

    python tests/lab/storm.py --seconds 1200 --ranks 2 --seed 7        (or: make soak)

Everything random comes from one seed: the same seed makes the same plan. What the machine makes of it is its own. At
the end all that was broken is lifted, everybody contributes again, the job is ended, and the journals are judged:
every step committed once and by one group, every batch trained exactly once, the same bits on all replicas. A job
lives as long as one replica holds its state, so the storm never takes the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in {None, ""}:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "lab"

import itertools

import judge

from agents.api.models import CoordinatorAction
from ftctl.client.cluster import Snapshot
from ftctl.context import World
from ftctl.lab import teardown
from ftctl.lab.ready import connect

from .conftest import machine, remains
from .test_whole_job import User

REPLICAS = ("r0", "r1", "r2")
RAILS = ("rail0", "rail1")
CALM_S = 180.0  # for all to contribute again, once everything is lifted; a bound for hangs, not a figure
WEIGHTS = {
    "kill": 5,
    "kill-two": 1,
    "freeze": 3,
    "link-down": 4,
    "blackhole": 3,
    "cut": 1,
    "drain": 2,
    "evict": 1,
    "coordinator": 2,
    "agent": 1,
}
MIN_CONTRIBUTORS = {"kill": 2, "kill-two": 3, "freeze": 3, "cut": 3, "drain": 2, "evict": 2}


@dataclass(frozen=True)
class Blow:
    """One thing that happens. `replica`, `rank`, `rail` say where; `for_s` how long, where it ends; `then_s`: calm."""

    kind: str
    replica: int
    rank: int
    rail: int
    for_s: float
    then_s: float

    def __str__(self) -> str:
        return f"{self.kind} r{self.replica}/{self.rank} rail{self.rail} for {self.for_s:.1f} s"


def plan(seed: int, count: int, ranks: int) -> list[Blow]:
    dice = random.Random(seed)
    kinds = list(WEIGHTS)
    return [
        Blow(
            kind=dice.choices(kinds, list(WEIGHTS.values()))[0],
            replica=dice.randrange(len(REPLICAS)),
            rank=dice.randrange(ranks),
            rail=dice.randrange(len(RAILS)),
            for_s=dice.choice([0.2, 0.6, 1.5, 4.0]),
            then_s=dice.choice([0.0, 0.5, 2.0, 6.0]),
        )
        for _ in range(count)
    ]


@dataclass
class Settings:
    seed: int
    seconds: float = 1200.0
    ranks: int = 2
    step_ms: int = 200
    say: Callable[[str], None] = lambda line: None


@dataclass
class Result:
    blows: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    steps: int = 0
    lives: int = 0
    retries: int = 0
    gaps_ms: list[float] = field(default_factory=list)  # between commits of the job
    longest: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        ordered = sorted(self.gaps_ms) or [0.0]
        shown = ", ".join(f"{kind} {count}" for kind, count in sorted(self.blows.items()))
        lines = [
            f"{sum(self.blows.values())} blows ({shown}; {self.left_out} left out to spare the last replica)",
            f"{self.steps} steps, {self.lives} lives of {len(REPLICAS)} replicas, {self.retries} steps reduced again",
            f"from commit to commit: median {statistics.median(ordered):.0f} ms, "
            f"p99 {ordered[int(0.99 * (len(ordered) - 1))]:.0f} ms, longest {ordered[-1]:.0f} ms",
            *(f"  {line}" for line in self.longest),
        ]
        return "\n".join(lines)


class Storm:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.blows = plan(settings.seed, int(settings.seconds) + 100, settings.ranks)
        self.user = User(Path(tempfile.mkdtemp(prefix="ftctl-storm-")))
        self.result = Result()
        self.log: list[tuple[float, str]] = []
        self.undo: list[tuple[float, str, Callable[[], None]]] = []  # what takes itself back: when, what, how
        self.begun = time.monotonic()

    def again(self) -> str:
        s = self.settings
        return f"again: python tests/lab/storm.py --seconds {s.seconds:g} --ranks {s.ranks} --seed {s.seed}"

    def note(self, line: str) -> None:
        self.log.append((time.monotonic(), line))
        self.settings.say(f"{time.monotonic() - self.begun:7.1f}  {line}")

    def run(self) -> Result:
        before = machine()
        user, s = self.user, self.settings
        self.note(self.again())
        try:
            size = ("--ranks", str(s.ranks), "--step-ms", str(s.step_ms), "--seed", str(s.seed % 1000))
            up = user.types("lab", "up", *size, within_s=300)
            assert up.returncode == 0, f"lab up: exit {up.returncode}: {up.stderr}"
            uuid = user.lab.manifest.uuid
            self.blow()
            self.calm()
            self.end()
            problems = self.verdict()
            user.does("lab", "down")
            left = [*remains(uuid), *sorted(machine() - before)]
            problems += [f"left behind: {thing}" for thing in left]
            if problems:
                raise AssertionError("\n".join(problems))
            return self.result
        except BaseException as error:
            kept = self.keep()
            raise AssertionError(f"{error}\n{self.story()}\nkept: {kept}\n{self.again()}") from error
        finally:
            for _, _, back in self.undo:
                with contextlib.suppress(OSError):
                    back()
            if user.paths.root.exists():
                teardown.take_down(user.paths, grace_s=0)
            shutil.rmtree(user.state, ignore_errors=True)

    def story(self) -> str:
        return "\n".join(f"{at - self.begun:9.3f}  {line}" for at, line in self.log[-60:])

    def keep(self) -> str:
        """Copies logs and journals to where a person can read them."""
        if not self.user.paths.root.exists():
            return "nothing"
        place = Path(tempfile.mkdtemp(prefix="ftctl-storm-kept-"))
        shutil.copytree(self.user.state, place, dirs_exist_ok=True, ignore=lambda *_: [], symlinks=True)
        return str(place)

    # --- what happens ------------------------------------------------------------------------------------------------

    def blow(self) -> None:
        end = time.monotonic() + self.settings.seconds
        for blow in self.blows:
            if time.monotonic() >= end:
                return
            if self.contributors() < MIN_CONTRIBUTORS.get(blow.kind, 1):
                self.result.left_out += 1
                self.wait(0.5)
                continue
            self.note(str(blow))
            getattr(self, blow.kind.replace("-", "_"))(blow)
            self.result.blows[blow.kind] += 1
            self.wait(blow.then_s)

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            for due in [item for item in self.undo if item[0] <= time.monotonic()]:
                self.undo.remove(due)
                self.note(f"over: {due[1]}")
                due[2]()
            if time.monotonic() >= until:
                return
            time.sleep(0.05)

    def later(self, seconds: float, what: str, back: Callable[[], None]) -> None:
        self.undo.append((time.monotonic() + seconds, what, back))

    def contributors(self) -> int:
        """Of those that are not frozen or about to be found out: as the coordinator says it, twice."""
        counts = []
        for _ in range(2):
            job = self.look().job
            alive = [r for r in job.contributors if r not in self.frozen()] if job is not None else []
            counts.append(len(alive) if job is not None and job.state == "running" else 0)
            time.sleep(0.3)
        return min(counts)

    def look(self) -> Snapshot:
        async def ask() -> Snapshot:
            async with connect(World(), self.user.lab) as agents:
                return await agents.snapshot()

        return asyncio.run(ask())

    def frozen(self) -> set[str]:
        return {what.split()[1] for _, what, _ in self.undo if what.startswith(("freeze", "cut"))}

    def ranks(self, replica: int) -> dict[int, int]:
        """rank -> process"""
        found = [rank for view in self.look().views() for rank in view.ranks]
        return {rank.rank: rank.pid for rank in found if rank.replica == REPLICAS[replica] and rank.state != "gone"}

    def signal(self, pid: int | None, number: int) -> None:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, blow: Blow) -> None:
        self.signal(self.ranks(blow.replica).get(blow.rank), signal.SIGKILL)

    def kill_two(self, blow: Blow) -> None:
        victims = [self.ranks(r).get(blow.rank) for r in range(len(REPLICAS)) if r != blow.replica]
        for pid in victims:
            self.signal(pid, signal.SIGKILL)

    def freeze(self, blow: Blow) -> None:
        pid = self.ranks(blow.replica).get(blow.rank)
        if pid is None or f"r{blow.replica}" in self.frozen():
            return
        self.signal(pid, signal.SIGSTOP)
        self.later(blow.for_s, f"freeze r{blow.replica}", lambda: self.signal(pid, signal.SIGCONT))

    def link_down(self, blow: Blow) -> None:
        node, rail = f"node{blow.replica}", RAILS[blow.rail]
        done = self.user.types(
            *("inject", "link-down", "--node", node, "--nic", rail, "--duration", f"{max(1.0, blow.for_s):g}s"),
            *("--reason", "storm"),
        )
        if done.returncode not in (0, 6, 7):  # its agent may be dead just now, or the rail the last one
            self.note(f"link-down: exit {done.returncode}: {done.stderr.strip()}")

    def blackhole(self, blow: Blow) -> None:
        """Packets of one rail vanish, its carrier stays."""
        self.drop(blow, f'iifname "{RAILS[blow.rail]}" drop', f'oifname "{RAILS[blow.rail]}" drop')

    def cut(self, blow: Blow) -> None:
        """Two replicas do not reach each other over any rail; both reach the coordinator and the third."""
        other = (blow.replica + 1) % len(REPLICAS)
        theirs = ", ".join(f"10.99.{k + 1}.{other + 1}" for k in range(len(RAILS)))
        self.drop(blow, f"ip saddr {{ {theirs} }} drop", f"ip daddr {{ {theirs} }} drop")

    def drop(self, blow: Blow, rule_in: str, rule_out: str) -> None:
        node, table = f"node{blow.replica}", f"storm{len(self.log)}"
        rules = (
            f"add table inet {table}; add chain inet {table} in {{ type filter hook input priority 0; }}; "
            f"add chain inet {table} out {{ type filter hook output priority 0; }}; "
            f"add rule inet {table} in {rule_in}; add rule inet {table} out {rule_out}"
        )
        self.user.does("lab", "exec", node, "--", "nft", rules)
        undo = ("lab", "exec", node, "--", "nft", f"delete table inet {table}")
        self.later(blow.for_s, f"{blow.kind} r{blow.replica}", lambda: self.user.does(*undo) and None)

    def drain(self, blow: Blow) -> None:
        name = REPLICAS[blow.replica]
        done = self.user.types("drain", "replica", name, "--reason", "storm", "--wait", "--timeout", "20s")
        self.note(f"drain: exit {done.returncode} {done.stderr.strip()[:200]}")
        self.wait(blow.for_s)
        self.rejoin(name)

    def rejoin(self, name: str) -> None:
        done = self.user.types("rejoin", "replica", name)
        if done.returncode != 0:
            self.note(f"rejoin {name}: exit {done.returncode}: {done.stderr.strip()[:200]}")

    def evict(self, blow: Blow) -> None:
        done = self.user.types("evict", "replica", REPLICAS[blow.replica], "--reason", "storm", "--yes")
        self.note(f"evict: exit {done.returncode} {done.stderr.strip()[:200]}")

    def coordinator(self, blow: Blow) -> None:
        job = self.look().job
        self.signal(job.pid if job is not None else None, signal.SIGKILL)

    def agent(self, blow: Blow) -> None:
        found = [view.agent.pid for view in self.look().views() if view.name == f"node{blow.replica}"]
        self.signal(found[0] if found else None, signal.SIGKILL)

    # --- the end -----------------------------------------------------------------------------------------------------

    def calm(self) -> None:
        """Everything is lifted; all contribute again, and make some steps together."""
        self.note("calm: everything is lifted")
        while self.undo:
            self.wait(0.1)
        until = time.monotonic() + CALM_S
        since = 0
        while True:
            seen = self.look()
            job, faults = seen.job, [fault for fault in seen.faults() if fault.state != "reverted"]
            if job is not None and sorted(job.contributors) == list(REPLICAS) and not faults:
                since = since or job.step
                if job.step >= since + 10:
                    return
            else:
                since = 0
            for replica in job.replicas if job is not None else ():
                if replica.state == "drained":
                    self.rejoin(replica.name)
            assert time.monotonic() < until, f"not all contribute within {CALM_S:g} s: {job} {faults}"
            time.sleep(0.5)

    def end(self) -> None:
        async def finish() -> None:
            async with connect(World(), self.user.lab) as agents:
                await agents.act(lambda client: client.finish(CoordinatorAction(reason="storm")))

        self.note("finish")
        asyncio.run(finish())
        until = time.monotonic() + CALM_S
        while not all(self.ended(lines) for lines in self.journals().values()):
            assert time.monotonic() < until, "a rank did not end"
            time.sleep(0.5)

    def journals(self) -> dict[str, list[dict[str, Any]]]:
        return judge.journals_of(self.user.paths.journal)

    @staticmethod
    def ended(lines: list[dict[str, Any]]) -> bool:
        last = next((line for line in reversed(lines) if line["kind"] in ("start", "end")), None)
        return last is not None and last["kind"] == "end"

    def verdict(self) -> list[str]:
        journals = self.journals()
        expected = {f"{name}/{rank}" for name in REPLICAS for rank in range(self.settings.ranks)}
        problems = [f"no journal of {name}" for name in sorted(expected - set(journals))]
        problems += judge.truths(journals) + judge.applied(journals)
        problems += judge.data(journals, max(line["step"] for line in judge.of_kind(journals["r0/0"], "step")))
        problems += judge.same_bits(journals, sorted(journals))
        self.measure(journals)
        return problems

    def measure(self, journals: dict[str, list[dict[str, Any]]]) -> None:
        commits: dict[int, float] = {}
        retried: set[int] = set()
        for name in REPLICAS:
            lines = journals.get(f"{name}/0", [])
            self.result.lives += len({line["incarnation"] for line in judge.of_kind(lines, "start")})
            for line in judge.of_kind(lines, "step"):
                if not line["replayed"]:
                    commits[line["step"]] = min(line["t_commit"], commits.get(line["step"], line["t_commit"]))
                    retried |= {line["step"]} if line["retries"] else set()
        self.result.steps, self.result.retries = len(commits), len(retried)
        times = sorted(commits.values())
        gaps = [(b - a, a) for a, b in itertools.pairwise(times)]
        self.result.gaps_ms = [gap * 1000 for gap, _ in gaps]
        for gap, at in sorted(gaps, reverse=True)[:8]:
            during = [line for when, line in self.log if at - 1.0 <= when <= at + gap]
            self.result.longest.append(f"{gap * 1000:.0f} ms at {at - self.begun:.1f} s: {'; '.join(during[-4:])}")


def main() -> int:
    parser = argparse.ArgumentParser(description="A storm over a lab.")
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--step-ms", type=int, default=200)
    given = parser.parse_args()
    settings = Settings(given.seed, given.seconds, given.ranks, given.step_ms, lambda line: print(line, flush=True))
    try:
        print(Storm(settings).run())
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
