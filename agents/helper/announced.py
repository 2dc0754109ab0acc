"""The training processes that the agent names with a request, each checked again before a fault may touch it.

The kernel says whose a process is (all four user ids of /proc/PID/status): it must be the agent's own user, who could
signal it anyway, or one that root named in `process_users`. One whose ids differ (a set-user-id program) is not taken.
Where root named `process_cgroups`, it must be in one of those too: which service a process belongs to is the kernel's
word, not the agent's, and a shell or a database of that user is in none of them.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path

from agents.faults.contract import Refusal
from agents.helper.wire import Inject
from agents.host import coordinators
from agents.host.errors import HostError
from agents.host.processes import start_time_of
from agents.host.workers import NoWorkers, Worker, aimed_at


class Announced(NoWorkers):
    """Workers of agents/host/workers.py, as of the request that is being carried out. One request at a time."""

    def __init__(self, users: frozenset[int], cgroups: tuple[str, ...] = (), *, registered_only: bool = False) -> None:
        self._users = users
        self._cgroups = cgroups
        self._registered_only = registered_only
        self._workers: tuple[Worker, ...] = ()
        self._coordinator: Worker | None = None

    def take(self, wish: Inject, target: str, proven: frozenset[int] = frozenset()) -> Refusal | None:
        """From now on these count, unless one that is meant may not be faulted. `target` is the fault's kind of it.
        `proven`: processes that made a connection to the agent, by the kernel's word."""
        self._workers, self._coordinator = (), None
        meant = {"replica": aimed_at(wish.workers, wish.replica, wish.rank), "node": wish.workers}.get(target, ())
        if target == "coordinator" and wish.coordinator is not None:
            meant = (wish.coordinator,)
        for worker in meant:
            if why := self.problem(worker):
                return Refusal("refused", why, "the helper's configuration on the node: process_users, process_cgroups")
            if self._registered_only and target != "coordinator" and worker.pid not in proven:
                why = f"{worker.text} never registered with the agent, so that nothing shows that it is a rank"
                return Refusal("refused", why, "the helper's configuration on the node: registered_only")
        self._workers = meant if target != "coordinator" else ()
        self._coordinator = wish.coordinator
        return None

    def all(self) -> tuple[Worker, ...]:
        return tuple(w for w in self._workers if start_time_of(w.pid) == w.start_time)

    def coordinator(self) -> Worker:
        """Raises HostError."""
        found = self._coordinator
        if found is None:
            return coordinators.unknown()
        if not coordinators.runs_one(found.pid) or start_time_of(found.pid) != found.start_time:
            raise HostError("find the coordinator", 0, f"process {found.pid} here is another one")
        return Worker("coordinator", -1, found.pid, found.start_time)

    def problem(self, worker: Worker) -> str:
        """Why it may not be touched; empty if it may."""
        if worker.pid <= 1 or worker.pid in (os.getpid(), os.getppid()):
            return f"process {worker.pid} is not one that may be faulted"
        users = _users(worker.pid)
        if users is None or start_time_of(worker.pid) != worker.start_time:
            return ""  # it has ended, which the fault itself will say
        if len(users) != 1 or not users <= self._users:
            names = "/".join(str(user) for user in sorted(users))
            return f"{worker.text} belongs to user {names}, whose processes may not be faulted"
        if self._cgroups and (why := _outside(worker.pid, self._cgroups)):
            return f"{worker.text} {why}"
        return ""


def _outside(pid: int, patterns: tuple[str, ...]) -> str:
    """Why its control groups are none of root's; empty: one is. Only their owner moves processes into them."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""  # it has ended
    groups = [line.split(":", 2)[2] for line in lines if line.count(":") >= 2]
    if any(fnmatchcase(group, pattern) for group in groups for pattern in patterns):
        return ""
    shown = next((group for group in groups if group != "/"), "/")
    return f"is in control group {shown}, and only processes in {', '.join(patterns)} may be faulted"


def _users(pid: int) -> frozenset[int] | None:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("Uid:"):
            return frozenset(int(word) for word in line.split()[1:5])
    return None
