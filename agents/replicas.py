"""Drain, evict and rejoin: the coordinator decides, and a replica that is supervised here is made to follow.

A drained replica leaves by itself. An evicted one may be unable to (that may be why it was evicted): if the process of
before is still there after the grace period it is ended and, if it may come back, started again. A rejoin is a start,
once the coordinator agrees.
"""

from __future__ import annotations

import contextlib
import threading
import time

from agents.api.models import ActionAnswer, ReplicaAction
from agents.because import NOTHING, Because
from agents.cordon import Cordon
from agents.job import JobRelay
from agents.problems import ApiProblem
from agents.recovery.errors import SupervisionError
from agents.recovery.supervisor import Supervisor

POLL_S = 0.1
ANNOUNCE_S = 0.3
POLICY = "policy-"  # what the policies of nodes call themselves


class ReplicaActions:
    """Blocking; raises ApiProblem."""

    def __init__(
        self, relay: JobRelay, supervisor: Supervisor | None, grace_s: float, cordon: Cordon | None = None
    ) -> None:
        self._relay = relay
        self._supervisor = supervisor
        self._grace_s = grace_s
        self._cordon = cordon

    def drain(self, principal: str, replica: str, wish: ReplicaAction, because: Because | None = None) -> ActionAnswer:
        because = because or Because(wish.incident, "drain")
        supervisor = self._supervising(replica)
        if supervisor is None or wish.dry_run:
            return self._ask(principal, "drain", replica, wish, because)
        supervisor.leaves(replica, because)
        try:
            return self._ask(principal, "drain", replica, wish, because)
        except ApiProblem:
            supervisor.leaves(replica, NOTHING)
            raise

    def evict(self, principal: str, replica: str, wish: ReplicaAction, because: Because | None = None) -> ActionAnswer:
        because = because or Because(wish.incident, "evict")
        supervisor = self._supervising(replica)
        before = self._pids(replica)
        answer = self._ask(principal, "evict", replica, wish, because)
        if supervisor is None or wish.dry_run:
            return answer
        if not wish.rejoin:
            supervisor.stop_replica(replica, f"evicted by {_by(principal)}: {wish.reason}", because)
            return answer
        if before:
            whom = (supervisor, replica, before, because)
            threading.Thread(target=self._end, args=whom, daemon=True, name="evict").start()
        return answer

    def rejoin(self, principal: str, replica: str, wish: ReplicaAction, because: Because | None = None) -> ActionAnswer:
        because = because or Because(wish.incident, "rejoin")
        supervisor = self._supervising(replica)
        if supervisor is not None:
            self._refuse_if_cordoned(replica)
        answer = self._ask(principal, "rejoin", replica, wish, because)
        if supervisor is None or wish.dry_run:
            return answer
        supervisor.rejoin(replica, because)
        return ActionAnswer(code=answer.code, text=f"{answer.text}; its process is started on this node")

    def restart(self, principal: str, replica: str, reason: str, because: Because) -> ActionAnswer:
        """The processes here, because of an incident. The coordinator is told why it will lose the replica; one that
        does not answer at once holds up nothing, and then its events do not carry the incident."""
        if self._supervising(replica) is not None:
            told = threading.Thread(
                target=self._announce, args=(principal, replica, because), daemon=True, name="announce"
            )
            told.start()
            told.join(ANNOUNCE_S)
        return self.supervise("restart", replica, f"restarted by {_by(principal)}: {reason}", because)

    def _announce(self, principal: str, replica: str, because: Because) -> None:
        with contextlib.suppress(ApiProblem):
            self._relay.act(principal, "restarts", "", replica=replica, because=because)

    def supervise(self, verb: str, replica: str, reason: str, because: Because = NOTHING) -> ActionAnswer:
        """Start, stop, restart or rejoin the processes here, whatever the coordinator thinks."""
        if self._supervisor is None:
            hint = "`supervision` in the agent's configuration lists the replicas"
            raise ApiProblem("unknown-replica", f"replica {replica}", "this agent supervises none", hint)
        if verb != "stop" and self._supervisor.supervises(replica):
            self._refuse_if_cordoned(replica)
        try:
            if verb == "start":
                self._supervisor.start_replica(replica)
            elif verb == "rejoin":
                self._supervisor.rejoin(replica, because)
            elif verb == "stop":
                self._supervisor.stop_replica(replica, reason, because)
            else:
                self._supervisor.restart_replica(replica, reason, because)
        except SupervisionError as error:
            raise ApiProblem(error.code, error.thing, error.reason, error.hint) from None
        return ActionAnswer(code="ok", text=f"replica {replica}: {verb} is under way")

    def _ask(self, principal: str, op: str, replica: str, wish: ReplicaAction, because: Because) -> ActionAnswer:
        return self._relay.act(
            principal,
            op,
            wish.reason,
            replica=replica,
            force=wish.force,
            rejoin=wish.rejoin,
            dry_run=wish.dry_run,
            because=because,
            max_share=wish.max_share,
        )

    def _refuse_if_cordoned(self, replica: str) -> None:
        if self._cordon is not None:
            self._cordon.refuse(f"replica {replica}")

    def _supervising(self, replica: str) -> Supervisor | None:
        supervisor = self._supervisor
        return supervisor if supervisor is not None and supervisor.supervises(replica) else None

    def _pids(self, replica: str) -> set[int]:
        views = self._supervisor.views() if self._supervisor is not None else []
        return {p.pid for p in views if p.replica == replica and p.pid is not None and p.state == "running"}

    def _end(self, supervisor: Supervisor, replica: str, before: set[int], because: Because) -> None:
        deadline = time.monotonic() + self._grace_s
        while self._pids(replica) & before:
            if time.monotonic() >= deadline:
                supervisor.restart_replica(replica, "evicted, and it did not end by itself", because)
                return
            time.sleep(POLL_S)


def _by(principal: str) -> str:
    return f"policy of {principal.removeprefix(POLICY)}" if principal.startswith(POLICY) else principal
