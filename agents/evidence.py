"""What the ranks of a replica on this node are doing: one sentence each, and all that can be found out about it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from agents.api.evidence import RankStacks, ThreadView
from agents.host.threads import Looked, look
from agents.node import Parts
from agents.problems import ApiProblem
from ftar_core.wire.agentlink import StackWay

MAX_RANKS = 16  # of one answer
STATES = {
    "R": "running",
    "S": "waiting",
    "D": "in an uninterruptible wait (disk, or a driver)",
    "T": "stopped by a signal (state T)",
    "t": "stopped by a tracer (state t)",
    "Z": "ended, but not waited for (state Z)",
}


@dataclass(frozen=True)
class _Rank:
    rank: int
    pid: int
    way: StackWay | None


class Evidence:
    """Looks at processes, one replica at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lock = threading.Lock()

    def of_replica(self, replica: str, rank: int | None = None) -> list[RankStacks]:
        """Of its ranks on this node, or of one. Blocks for seconds. Raises ApiProblem if none is here."""
        found = [one for one in self._ranks(replica) if rank is None or one.rank == rank]
        if not found:
            thing = f"replica {replica}" if rank is None else f"rank {rank} of replica {replica}"
            raise ApiProblem("unknown-replica", thing, f"no process of it on {self._parts.name}", "ftctl ranks")
        with self._lock:
            return [self._look(replica, one) for one in found[:MAX_RANKS]]

    def _ranks(self, replica: str) -> list[_Rank]:
        known: dict[int, _Rank] = {}
        for process in self._parts.processes():
            if process.replica == replica and process.pid is not None and process.state == "running":
                known[process.rank] = _Rank(process.rank, process.pid, None)
        registry = self._parts.registry
        for rank, pid, way in registry.ways(replica) if registry is not None else []:
            known[rank] = _Rank(rank, pid, way)
        return [known[rank] for rank in sorted(known)]

    def _look(self, replica: str, one: _Rank) -> RankStacks:
        seen = look(one.pid, one.way)
        return RankStacks(
            replica=replica,
            rank=one.rank,
            node=self._parts.name,
            pid=one.pid,
            time=time.time(),
            state=seen.state,
            summary=in_a_sentence(seen),
            python=seen.python,
            note=seen.note,
            status=seen.status,
            threads=[
                ThreadView(tid=t.tid, name=t.name, state=t.state, wchan=t.wchan, syscall=t.syscall)
                for t in seen.threads
            ],
            threads_left_out=seen.threads_left_out,
            kernel_stack=seen.kernel_stack,
        )


def in_a_sentence(seen: Looked) -> str:
    """Where its main thread is, as far as it can be said."""
    if not seen.state:
        return seen.note
    main = next((t for t in seen.threads if t.tid == seen.pid), None)
    state = main.state if main is not None else seen.state
    parts = [STATES.get(seen.state if seen.state in "TtZ" else state, f"in state {state}")]
    if main is not None and main.wchan and state in "SD":
        parts.append(f"in the kernel's {main.wchan}")
    frame = main_frame(seen.python)
    if frame:
        parts.append(f"its main thread at {frame}")
    elif seen.note and seen.state not in "TtZ":
        parts.append(seen.note)
    return ", ".join(parts)


def main_frame(python: str) -> str:
    """`trainer.py:44 in happen`, of the thread that faulthandler lists last: the one the interpreter began with."""
    group: list[str] = []
    for line in python.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            group = []
        elif line.startswith("  File "):
            group.append(line)
    if not group:
        return ""
    _, path, rest = group[0].split('"', 2)
    number, _, function = rest.removeprefix(", line ").partition(" in ")
    return f"{path.rpartition('/')[2]}:{number} in {function}"


def as_text(ranks: list[RankStacks], limit: int) -> str:
    """For an event: the sentence first, then what is behind it, at most `limit` bytes."""
    lines = [f"rank {one.rank} (pid {one.pid} on {one.node}) is {one.summary}" for one in ranks]
    for one in ranks:
        lines.append(f"--- rank {one.rank}, pid {one.pid} on {one.node}")
        lines += one.python.splitlines() or [one.note]
        lines += [f"thread {t.tid} {t.name}: {t.state} {t.wchan} {t.syscall}".rstrip() for t in one.threads[:16]]
    return "\n".join(lines).encode()[:limit].decode(errors="ignore")
