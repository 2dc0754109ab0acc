"""One job of `bench commit`: starts the coordinator, the leaders and the simulated ranks, hears what they say, kills
one replica and starts it again, and reads from /proc what all that costs."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

from ftar_core.bench.commit_ranks import JOB
from ftar_core.bench.commit_stamps import Stamps
from ftar_core.bench.report import BenchError

WARM_UP = 3  # steps that are not counted
STALL_S = 180.0
PATIENCE = {"--suspect-after": "30s", "--evict-after": "60s"}  # that many processes on a machine may be late


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

    def __init__(self, replicas: int, ranks: int, steps: int, period_s: float, stack: ExitStack, *, near: bool) -> None:
        self.replicas, self.ranks, self.steps = replicas, ranks, steps
        self._names = [f"r{i}" for i in range(replicas)]
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._words = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  it is
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftar-bench-")))
        token = secrets.token_hex(32)
        self.coordinator, self._at = _coordinator(directory, token, replicas, self._words)
        stack.callback(_end, self.coordinator)
        self._stamps = Stamps(directory / "stamps", replicas, new=True)
        stack.callback(self._stamps.close)
        common = {
            "parent": os.getpid(),
            "token": token,
            "coordinator": self._at,
            "replicas": replicas,
            "ranks": ranks,
            "period_s": period_s,
            "near": near,
            "stamps": str(directory / "stamps"),
        }
        count = max(1, min(os.cpu_count() or 1, replicas))
        each = -(-replicas // count) * ranks
        self.leaders = Child("commit_leaders", {**common, "descriptors": ranks + replicas}, self._words)
        self.sims = [Child("commit_ranks", {**common, "descriptors": each}, self._words) for _ in range(count)]
        for child in (self.leaders, *self.sims):
            stack.callback(child.end)
            self._selector.register(child.fileno(), selectors.EVENT_READ, child)
        self.pids: dict[str, int] = {}
        self.near: dict[Child, int] = {}  # of a simulator's ranks, so many are connected by Unix sockets
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
        if line.get("near"):
            stamps = self._stamps
            told = stamps.last_commit(line["step"]) if "step" in line else stamps.last_epoch(line["entered"])
            line["has"] = max(line["has"], told)
        if "step" in line and "has" in line:
            self.near[child] = line["near"]
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
            commit.append((_last(lines) - reported) * 1000)
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
        return (_last(lines) - at) * 1000

    def join(self, replica: str) -> float:
        """Start it again; ms from caught up to everybody being in the epoch with it."""
        sim = self.sim_of(replica)
        if self.ranks > 1:
            del self._where[replica]
            self.leaders.tell(start=[replica])
            self.find(replica)
        sim.tell(connect=[(replica, *self.address(replica))])
        self.one("follows", replica)
        self.all_sims("step")  # of those that contribute
        step, epoch = self.latest
        self._names.append(replica)
        if self.ranks > 1:
            self.leaders.tell(replica=replica, step=step, epoch=epoch)

        def caught_up() -> None:
            sim.tell(shadow=replica, step=step, epoch=epoch)

        caught_up()
        at = float(self.one("ready", replica)["at"])
        lines = self.all_sims("entered")
        return (_last(lines) - at) * 1000

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


def _last(lines: list[dict[str, Any]]) -> float:
    """When the last rank had an order; at the latest when it had read it."""
    return float(min(max(line["has"] for line in lines), max(line["seen"] for line in lines)))


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
def running(replicas: int, ranks: int, steps: int, period_s: float, *, near: bool) -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(replicas, ranks, steps, period_s, stack, near=near)
