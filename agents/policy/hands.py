"""What the policy of an agent may do, and what it asks before: replicas, the cordon, the job's coordinator.

An agent acts for its own node: on the replicas whose processes are here. How many are out is asked of the coordinator
before each decision, for its reason; the limit itself goes with the request and is kept by the coordinator, which hears
one agent after the other. Its guard of min-replicas stands behind that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from agents.api.job import JobState, ReplicaAction
from agents.api.policyfile import OUT
from agents.because import Because
from agents.cordon import Cordon
from agents.host.gpus import Gpus, users_of
from agents.host.workers import Workers
from agents.job import JobRelay
from agents.policy.engine import Fleet
from agents.problems import ApiProblem
from agents.replicas import POLICY, ReplicaActions

AWAY = ("drained", "evicted", "unreachable")


class PolicyHands(Protocol):
    def whom(self, kind: str, name: str, *, whole_node: bool) -> tuple[str, ...]:
        """The replicas that use this object."""
        ...

    def fleet(self, action: str, whom: Sequence[str]) -> Fleet:
        """Never raises."""
        ...

    def act(self, action: str, replica: str, reason: str, because: Because, max_share: float) -> str:
        """What was done, in words. Raises ApiProblem, also if more than `max_share` of the fleet were out then."""
        ...

    def cordon(self, reason: str, because: Because) -> bool:
        """Whether this call did it. Raises ApiProblem."""
        ...

    def uncordon(self, reason: str, because: Because) -> None:
        """Raises ApiProblem."""
        ...


class NodeHands:
    """Blocking, for a few seconds at most."""

    def __init__(  # noqa: PLR0917
        self,
        node: str,
        supervised: Collection[str],
        workers: Workers,
        gpus: Gpus,
        relay: JobRelay,
        actions: ReplicaActions,
        cordon: Cordon,
    ) -> None:
        self.principal = f"{POLICY}{node}"
        self._supervised = frozenset(supervised)
        self._workers = workers
        self._gpus = gpus
        self._relay = relay
        self._actions = actions
        self._cordon = cordon

    def whom(self, kind: str, name: str, *, whole_node: bool) -> tuple[str, ...]:
        workers = self._workers.all()
        here = sorted(self._supervised | {worker.replica for worker in workers})
        if kind == "replica":
            replica = name.removeprefix("replica ")
            return (replica,) if replica in here else ()
        number = name.removeprefix("gpu ")
        if kind != "gpu" or whole_node or len(here) < 2 or not number.isdigit():
            return tuple(here)
        return tuple(sorted({worker.replica for worker in users_of(self._gpus.pids(int(number)), workers)}))

    def fleet(self, action: str, whom: Sequence[str]) -> Fleet:
        present = bool(whom)
        if not present or (action == "restart" and set(whom) <= self._supervised):
            return Fleet(1, present=present, whom=tuple(whom))
        try:
            job = self._relay.state(self.principal)
        except ApiProblem as error:
            return Fleet(1, whom=tuple(whom), problem=f"{error.body.thing}: {error.body.reason}")
        return fleet_of(job, action, whom)

    def act(self, action: str, replica: str, reason: str, because: Because, max_share: float) -> str:
        wish = ReplicaAction(reason=reason, rejoin=False, max_share=max_share)
        if action == "restart":
            return self._actions.restart(self.principal, replica, reason, because).text
        if action == "evict":
            return self._actions.evict(self.principal, replica, wish, because).text
        if action == "rejoin":
            return self._actions.rejoin(self.principal, replica, wish, because).text
        return self._actions.drain(self.principal, replica, wish, because).text

    def cordon(self, reason: str, because: Because) -> bool:
        return self._cordon.set(self.principal, reason, because=because)[0]

    def uncordon(self, reason: str, because: Because) -> None:
        view = self._cordon.view()
        if view is not None and view.by == self.principal:  # an operator's own stays
            self._cordon.clear(self.principal, reason, because=because)


def fleet_of(job: JobState, action: str, whom: Sequence[str]) -> Fleet:
    """Pure. Whoever does not contribute counts as out: it has to come back before another may go."""
    states = {replica.name: replica.state for replica in job.replicas}
    contributing = [name for name, state in states.items() if state in ("contributing", "suspect", "hung", "blocked")]
    size = max(job.replicas_wanted, len(contributing))
    gone = (*AWAY, "draining") if action == "rejoin" else AWAY  # it is about to be out, and must not be forgotten
    away = tuple(name for name in whom if states.get(name, "unreachable") in gone)
    known = tuple(name for name in whom if name in states)
    problem = ""
    if action == "promote" and not any(state == "spare" for state in states.values()):
        problem = "no hot spare has caught up"
    if action in OUT and not known:
        problem = f"the job knows no replica {', '.join(whom)}"
    spares = sum(state == "spare" for state in states.values())
    return Fleet(size, max(0, size - len(contributing)), True, tuple(whom), away, problem, spares)
