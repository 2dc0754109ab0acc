"""`python -m ftar_core.bench commit`: how soon a step is committed everywhere, in jobs of thousands of ranks.

The coordinator is the real one, the leaders are the job's own classes, each in a process of its own; ranks are
simulated, with a socket each, and do nothing but report and take orders (bench/commit_ranks.py). Heartbeats run beside
at the default interval.

COMMIT is the time from the moment when the last rank has reported to the moment when the commit has arrived at the
socket of the last rank. In a job every rank has a core of its own; here all share one machine, so the simulated ranks
run when the others leave a core free, and what they cost is told: "ranks" is their share of all CPU time. SEEN is the
time until they have read it too. EPOCH: a replica's leader is killed, until every rank that is left has the new epoch.
JOIN: its next life has caught up, until every rank is in the epoch with it (it waits for the end of a step).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

from ftar_core.bench.commit_ranks import JOB
from ftar_core.bench.limits import raise_descriptors
from ftar_core.bench.report import BenchError, Column, Help, Report, Row, UsageError, at_most, ended, number, percentile

SHAPES = "16x640,156x64,1024x1"
WARM_UP = 3  # steps that are not counted
STALL_S = 180.0
PATIENCE = {"--suspect-after": "30s", "--evict-after": "60s"}  # that many processes on a machine may be late
GOAL_MS = 50.0
MOST_RANKS, MOST_REPLICAS = 65536, 2048
MS = number(".1f", " ms")
COLUMNS = (
    Column("shape", "shape", 9),
    Column("ranks", "ranks", 7),
    Column("commit_ms_p50", "commit p50", 12, MS, at_most(GOAL_MS)),
    Column("commit_ms_p99", "p99", 10, MS),
    Column("seen_ms_p50", "seen p50", 11, MS),
    Column("coordinator_cpu_ms", "coord CPU", 11, MS),
    Column("leader_cpu_ms", "leader CPU", 12, MS),
    Column("ranks_cpu_share", "ranks", 7, lambda v: "-" if v is None else f"{float(v):.0%}"),
    Column("epoch_ms", "epoch", 10, MS),
    Column("join_ms", "join", 10, MS),
    Column("coordinator_mib", "coord", 9, number(".0f", " MiB")),
    Column("leader_mib", "leader", 9, number(".1f", " MiB")),
)


class Child:
    """A process that speaks JSON lines."""

    def __init__(self, module: str, spec: dict[str, Any], words: Any) -> None:
        self.name = module
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"ftar_core.bench.{module}", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
        )
        self.buffer = b""

    def fileno(self) -> int:
        assert self.process.stdout is not None  # noqa: S101  it is a pipe
        return self.process.stdout.fileno()

    def tell(self, **command: Any) -> None:
        if self.process.stdin is not None:
            try:
                self.process.stdin.write((json.dumps(command) + "\n").encode())
                self.process.stdin.flush()
            except BrokenPipeError:
                pass  # its end is seen by whoever reads

    def lines(self) -> list[dict[str, Any]]:
        """What it has said since the last look. Raises BenchError at its end."""
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            raise BenchError(f"{self.name} has ended")
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        self.process.kill()
        self.process.wait()


class Run:
    """One shape: everything that runs, and what it said."""

    def __init__(self, replicas: int, ranks: int, steps: int, period_s: float, stack: ExitStack) -> None:
        self.replicas, self.ranks, self.steps = replicas, ranks, steps
        self._names = [f"r{i}" for i in range(replicas)]
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._words = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  it is
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftar-bench-")))
        token = secrets.token_hex(32)
        self.coordinator, self._at = _coordinator(directory, token, replicas, self._words)
        stack.callback(_end, self.coordinator)
        common = {"parent": os.getpid(), "token": token, "coordinator": self._at, "ranks": ranks, "period_s": period_s}
        count = max(1, min(os.cpu_count() or 1, replicas))
        each = -(-replicas // count) * ranks
        self.leaders = Child("commit_leaders", {**common, "descriptors": ranks + replicas}, self._words)
        self.sims = [Child("commit_ranks", {**common, "descriptors": each}, self._words) for _ in range(count)]
        for child in (self.leaders, *self.sims):
            stack.callback(child.end)
            self._selector.register(child.fileno(), selectors.EVENT_READ, child)
        self.pids: dict[str, int] = {}
        self._where: dict[str, tuple[str, int]] = {}
        self.latest: tuple[int, list[Any]] = (0, [])
        self._steps: dict[int, list[dict[str, Any]]] = {}
        self._said: deque[tuple[Child, dict[str, Any]]] = deque()

    def sim_of(self, replica: str) -> Child:
        return self.sims[int(replica[1:]) % len(self.sims)]

    # --- what they say

    def _look(self, until: float) -> Iterator[tuple[Child, dict[str, Any]]]:
        """Lines as they come. Raises BenchError when nothing has come for too long, or somebody has ended."""
        while True:
            while self._said:
                yield self._said.popleft()
            if time.monotonic() > until:
                raise BenchError(f"nothing goes on for {STALL_S:g} s: {self._last_words()}")
            for key, _ in self._selector.select(0.5):
                for line in key.data.lines():
                    if "ended" in line and line["code"] not in (0, 75):
                        raise BenchError(f"{line['ended']} has ended: {line['reason']}")
                    if "pid" in line:
                        self.pids[line["leader"]] = line["pid"]
                        self._where[line["leader"]] = (line["host"], line["port"])
                    self._said.append((key.data, line))
            if self.coordinator.poll() is not None:
                raise BenchError(f"the coordinator has ended: {self._last_words()}")

    def _last_words(self) -> str:
        self._words.seek(0)
        said = self._words.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else "without a word"

    def all_sims(self, key: str, command: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
        """Do something, then wait until every simulator has said `key` (with the same value)."""
        command()
        found: dict[Any, dict[Child, dict[str, Any]]] = {}
        for child, line in self._look(time.monotonic() + STALL_S):
            self._note(child, line)
            if key in line:
                said = found.setdefault(line[key], {})
                said[child] = line
                if len(said) == len([s for s in self.sims if self._lives(s)]):
                    return list(said.values())
        return []

    def one(self, key: str, value: str) -> dict[str, Any]:
        """The next line that says so of this replica."""
        for child, line in self._look(time.monotonic() + STALL_S):
            self._note(child, line)
            if line.get(key) == value:
                return line
        return {}

    def _lives(self, sim: Child) -> bool:
        return any(self.sim_of(name) is sim for name in self._names)

    def _note(self, child: Child, line: dict[str, Any]) -> None:
        if "step" in line and "has" in line:
            self._steps.setdefault(line["step"], []).append(line)
            self.latest = max(self.latest, (line["step"], line["epoch"]))

    # --- what is done

    def start(self) -> None:
        """The job runs: all ranks are in its first epoch."""

        def connect() -> None:
            if self.ranks > 1:
                self.leaders.tell(start=self._names)
                for name in self._names:
                    if name not in self._where:
                        self.find(name)
            for sim in self.sims:
                mine = [name for name in self._names if self.sim_of(name) is sim]
                sim.tell(connect=[(name, *self.address(name)) for name in mine])

        self.all_sims("entered", connect)

    def find(self, replica: str) -> None:
        """Wait until its leader listens."""
        for child, line in self._look(time.monotonic() + STALL_S):
            self._note(child, line)
            if replica in self._where:
                return

    def address(self, replica: str) -> tuple[str, int]:
        return self._where.get(replica, self._at)

    def commits(self, report: Callable[[str, float], None]) -> tuple[list[float], list[float], dict[str, float]]:
        """(commit, seen) in ms of `steps` steps, and the CPU seconds that each kind of process took for them."""
        while self._complete() < WARM_UP:
            self.all_sims("step")
        first, before = self._complete(), self.cpu_s()
        while (done := self._complete() - first) < self.steps:
            report(f"step {done} of {self.steps}", done / self.steps)
            self.all_sims("step")
        used = {kind: total - before[kind] for kind, total in self.cpu_s().items()}
        commit, seen = [], []
        for step in range(first + 1, first + 1 + self.steps):
            lines = self._steps[step]
            reported = max(line["reported"] for line in lines)
            commit.append((max(line["has"] for line in lines) - reported) * 1000)
            seen.append((max(line["seen"] for line in lines) - reported) * 1000)
        return commit, seen, used

    def _complete(self) -> int:
        """The last step that every simulator has seen committed."""
        return max((step for step, lines in self._steps.items() if len(lines) == len(self.sims)), default=0)

    def lose(self, replica: str) -> float:
        """Kill it; ms until all the others have the new epoch."""
        at = time.time()

        def kill() -> None:
            nonlocal at
            at = time.time()
            if self.ranks > 1:
                os.kill(self.pids.pop(replica), signal.SIGKILL)
            else:
                self.sim_of(replica).tell(lose=replica)

        self._names.remove(replica)
        lines = self.all_sims("entered", kill)
        self._names.append(replica)
        return float((max(line["has"] for line in lines) - at) * 1000)

    def join(self, replica: str) -> float:
        """Start it again; ms from caught up to everybody being in the epoch with it."""
        sim = self.sim_of(replica)
        if self.ranks > 1:
            del self._where[replica]
            self.leaders.tell(start=[replica])
            self.find(replica)
        sim.tell(connect=[(replica, *self.address(replica))])
        self.one("follows", replica)
        self.all_sims("step")
        step, epoch = self.latest
        if self.ranks > 1:
            self.leaders.tell(replica=replica, step=step, epoch=epoch)

        def caught_up() -> None:
            sim.tell(shadow=replica, step=step, epoch=epoch)

        caught_up()
        at = self.one("ready", replica)["at"]
        lines = self.all_sims("entered")
        return float((max(line["has"] for line in lines) - at) * 1000)

    # --- what it costs

    def cpu_s(self) -> dict[str, float]:
        return {
            "coordinator": _cpu_s(self.coordinator.pid),
            "leaders": sum(_cpu_s(pid) for pid in self.pids.values()),
            "ranks": sum(_cpu_s(sim.process.pid) for sim in self.sims),
        }

    def memory_mib(self) -> tuple[float, float | None]:
        """Of the coordinator; of a leader, without what it shares with the others."""
        leaders = [_memory_mib(pid, "Private") for pid in self.pids.values()]
        return _memory_mib(self.coordinator.pid, "Rss"), mean(leaders) if leaders else None


def _coordinator(
    directory: Path, token: str, replicas: int, words: Any
) -> tuple[subprocess.Popen[bytes], tuple[str, int]]:
    """The real one, with the settings of a real job; its TCP and UDP port is the kernel's choice."""
    token_file, port_file = directory / "token", directory / "port"
    token_file.write_text(token)
    token_file.chmod(0o600)
    options = {
        "--job": JOB,
        "--store": directory / "store",
        "--replicas": replicas,
        "--token-file": token_file,
        "--listen": "127.0.0.1:0",
        "--port-file": port_file,
        **PATIENCE,
    }
    given = [str(word) for pair in options.items() for word in pair]
    process = subprocess.Popen(
        [sys.executable, "-m", "ftar_core.bench.commit_coordinator", str(os.getpid()), "--new", *given],
        stdin=subprocess.DEVNULL,
        stdout=words,
        stderr=words,
    )
    give_up = time.monotonic() + STALL_S
    while not port_file.exists():
        if process.poll() is not None or time.monotonic() > give_up:
            _end(process)
            words.seek(0)
            raise BenchError(f"the coordinator did not start: {words.read().decode(errors='replace').strip()[-300:]}")
        time.sleep(0.01)
    return process, ("127.0.0.1", int(port_file.read_text()))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _cpu_s(pid: int) -> float:
    """User and system time of all its threads (proc(5), stat)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mib(pid: int, kind: str) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


@contextmanager
def running(replicas: int, ranks: int, steps: int, period_s: float) -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(replicas, ranks, steps, period_s, stack)


def measure(replicas: int, ranks: int, options: argparse.Namespace, report: Callable[[str, float], None]) -> Row:
    with running(replicas, ranks, options.steps, options.period_ms / 1000) as run:
        report("starting", 0)
        run.start()
        commit, seen, used = run.commits(report)
        coordinator_mib, leader_mib = run.memory_mib()
        report("a replica is lost and comes back", 1)
        epoch_ms = join_ms = None
        if replicas > 1:
            epoch_ms = run.lose(f"r{replicas - 1}")
            join_ms = run.join(f"r{replicas - 1}")
    total = sum(used.values())
    return {
        "shape": f"{replicas}x{ranks}",
        "replicas": replicas,
        "ranks": replicas * ranks,
        "commits": len(commit),
        "period_ms": options.period_ms,
        "commit_ms_p50": round(percentile(commit, 0.5), 2),
        "commit_ms_p99": round(percentile(commit, 0.99), 2),
        "commit_ms_max": round(max(commit), 2),
        "seen_ms_p50": round(percentile(seen, 0.5), 2),
        "seen_ms_p99": round(percentile(seen, 0.99), 2),
        "coordinator_cpu_ms": round(used["coordinator"] / len(commit) * 1000, 2),
        "leader_cpu_ms": round(used["leaders"] / len(commit) / replicas * 1000, 2) if ranks > 1 else None,
        "ranks_cpu_share": round(used["ranks"] / total, 3) if total else None,
        "cpu_s": round(total, 2),
        "epoch_ms": None if epoch_ms is None else round(epoch_ms, 1),
        "join_ms": None if join_ms is None else round(join_ms, 1),
        "coordinator_mib": round(coordinator_mib, 1),
        "leader_mib": None if leader_mib is None else round(leader_mib, 2),
    }


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """ "16x640,1024x1" -> [(16, 640), (1024, 1)]: replicas x ranks of each."""
    shapes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", part.strip())
        if match is None:
            raise UsageError(f"{part!r}: replicas x ranks of each, such as 16x640, is expected")
        replicas, ranks = int(match[1]), int(match[2])
        if not 1 <= replicas <= MOST_REPLICAS or not 1 <= ranks <= MOST_RANKS or replicas * ranks > MOST_RANKS:
            raise UsageError(f"{part!r}: 1 to {MOST_REPLICAS} replicas, and at most {MOST_RANKS} ranks together")
        shapes.append((replicas, ranks))
    return shapes


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ftar_core.bench commit", description=__doc__, formatter_class=Help)
    parser.add_argument("--shape", default=SHAPES, help="replicas x ranks of each")
    parser.add_argument("--steps", type=int, default=200, help="commits that are measured")
    parser.add_argument("--period-ms", type=float, default=1000.0, help="length of a step: the ranks report together")
    parser.add_argument("--quick", action="store_true", help="a short run: 4x16 and 32x1, 20 commits each")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="how to print")
    options = parser.parse_args(argv)
    if options.quick:
        options.shape, options.steps, options.period_ms = "4x16,32x1", 20, 100.0
    options.shape = parse_shapes(options.shape)
    if not 1 <= options.steps <= 100_000:
        raise UsageError("--steps: 1 to 100000")
    if not 10 <= options.period_ms <= 60_000:
        raise UsageError("--period-ms: 10 to 60000")
    return options


def bench(argv: Sequence[str]) -> int:
    options = parse(argv)
    if sys.platform != "linux":
        raise UsageError("this benchmark needs Linux")
    for replicas, ranks in options.shape:
        raise_descriptors(max(ranks + replicas, -(-replicas // max(1, min(os.cpu_count() or 1, replicas))) * ranks))
    with Report("commit", COLUMNS, options.output) as report:
        for i, (replicas, ranks) in enumerate(options.shape):

            def step(what: str, share: float, i: int = i, shape: str = f"{replicas}x{ranks}") -> None:
                report.step(f"{shape}, {what}", (i + share) / len(options.shape))

            report.add(measure(replicas, ranks, options, step))
    return 0


def main(argv: Sequence[str]) -> int:
    return ended(lambda: bench(argv))
