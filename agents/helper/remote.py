"""Faults that the helper carries out, as the agent without rights sees them.

What there is comes from the helper over a request that it answers when something changed (wire.Look), so that views
never wait for it. Where it does not answer, what was last known stays, and the agent says so; the faults themselves end
without the agent's doing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from agents.api.protect import Protection
from agents.faults.catalog import CATALOG, AnyFault
from agents.faults.contract import Target
from agents.helper import wire
from agents.helper.client import HelperGone, ask
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.host.workers import Worker
from agents.injection.guard import CUT_OFF_S, Facts, JobFacts, Limits, OpenFault, blast_radius, cut_off, reachable
from agents.injection.ledger import Damaged, Entry
from agents.injection.problems import FaultProblem
from agents.injection.wish import Injection, addresses_of, asks_the_job, wish_of

RETRY_S = 1.0
ASK_S = 17.5
HINT = "systemctl status ft-agent-helper on the node"


class RemoteFaults:
    """`halted`: why nothing may be injected here; `elsewhere`: open faults that the agent keeps itself."""

    def __init__(
        self,
        path: Path,
        node: str,
        machine: Machine,
        emit: Callable[[str, str, str], None],
        *,
        job: Callable[[], JobFacts] = JobFacts,
        halted: Callable[[], str] = str,
        elsewhere: Callable[[], tuple[OpenFault, ...]] = tuple,
        limits: Limits,
        proof: Callable[[Worker], int | None] = lambda _worker: None,
    ) -> None:
        self._path, self._node, self._machine, self._emit = path, node, machine, emit
        self._job, self._elsewhere = job, elsewhere
        self.halted = halted
        self._proof = proof  # a descriptor of the connection that a rank made to the agent
        self._limits = limits  # the agent's own; the helper has root's
        self._lock = threading.Lock()
        self._faults: dict[str, wire.Fault] = {}
        self._damaged: tuple[wire.Damage, ...] = ()
        self._stamp = 0
        self._able: dict[str, str] | None = None
        self._roots: tuple[Protection, ...] = ()  # what root protects here
        self._gone = "it was not asked yet"
        self._gate = threading.Lock()  # no injection between a halt and the reverts that follow from it
        self._tidy = True  # what a predecessor left is still to be taken back
        self._ending = threading.Event()

    # --- views (never block) ------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        with self._lock:
            return sorted((one.entry for one in self._faults.values()), key=lambda e: e.created_boot_s)

    def find(self, name: str) -> Entry | None:
        found = self.entries()
        by_id = next((e for e in found if e.id == name), None)
        return by_id or next((e for e in found if name and e.request_id == name), None)

    def damaged(self) -> tuple[Damaged, ...]:
        with self._lock:
            return tuple(Damaged(Path(one.path), one.reason) for one in self._damaged)

    def by_hand(self, entry: Entry) -> list[str]:
        with self._lock:
            known = self._faults.get(entry.id)
        return [] if known is None else list(known.by_hand)

    def left_s(self, entry: Entry) -> float:
        return max(0.0, entry.due_boot_s() - self._machine.clock.boot_s()) if entry.open else 0.0

    def open_faults(self) -> tuple[OpenFault, ...]:
        found = [e for e in self.entries() if e.open]
        return tuple(
            OpenFault(e.id, e.kind, e.target.nic, self.left_s(e), e.target.replica, e.target.rank, _whole_node(e))
            for e in found
        )

    def holds_node(self) -> bool:
        return any(_whole_node(e) for e in self.entries() if e.open)

    def trouble(self) -> str:
        return f"ft-agent-helper does not answer: {self._gone}" if self._gone else ""

    def protections(self) -> tuple[Protection, ...]:
        with self._lock:
            return self._roots

    def unsupported(self, fault: AnyFault) -> str:
        with self._lock:
            able = self._able
        if self._gone or able is None:
            return self.trouble() or "ft-agent-helper has not said yet what it can do"
        return able.get(fault.kind, "the helper of this node does not know it")

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take back whatever a predecessor asked for; later, if the helper cannot be reached now."""
        with self._gate:
            try:
                self._tidied()
            except FaultProblem as error:
                self._lost(error.reason)
        threading.Thread(target=self._watch, name="helper", daemon=True).start()

    def close(self) -> list[Entry]:
        """Take everything back; what is still open afterwards, or may be, is returned."""
        self.halted = lambda: "the agent is ending"
        try:
            self.revert_all("the agent ends", settle=True)
        except FaultProblem as error:
            if any(e.open for e in self.entries()):
                self._emit("fault.stuck", self._node, f"{error}; the helper takes it back when its time is up")
        self._ending.set()
        return [e for e in self.entries() if e.open]

    def inject(self, wish: Injection) -> Entry:
        """Raises FaultProblem."""
        fault = CATALOG[wish.kind]
        thing = f"{wish.kind} on {'/'.join(part for part in (self._node, wish.nic or wish.replica) if part)}"
        job = self._job() if asks_the_job(fault, wish, self._limits) else JobFacts()
        coordinator = None
        if fault.target == "coordinator":
            try:
                coordinator = self._machine.coordinator()
            except HostError as error:
                reason = f"the coordinator is no process of {self._node}: {error.text}"
                raise FaultProblem("refused", thing, reason, "--node NODE") from None
        request = wire.Inject(
            kind=wish.kind,
            owner=wish.owner[:64],
            duration_s=wish.duration_s,
            nic=wish.nic,
            replica=wish.replica,
            rank=wish.rank,
            reason=wish.reason[:500],
            params=dict(wish.params),
            request_id=wish.request_id,
            dead_man_s=wish.dead_man_s,
            allow_last_rail=wish.allow_last_rail,
            allow_last_replica=wish.allow_last_replica,
            dry_run=wish.dry_run,
            job=wire.JobSaid(job.known, job.contributing, job.min_replicas, job.problem[:500]),
            workers=self._machine.workers.all() if fault.target in ("replica", "node") else (),
            coordinator=coordinator,
            here=tuple(sorted({worker.replica for worker in self._machine.workers.all()})),
            protect=tuple(wire.Protected.of(one) for one in (*self._limits.protection, *wish.protection)),
            elsewhere=tuple(
                wire.Elsewhere(one.id, one.kind, one.nic, one.left_s, one.replica, one.rank, one.whole_node)
                for one in self._elsewhere()
            ),
        )
        if not self._gate.acquire(timeout=ASK_S):
            raise FaultProblem("failed", thing, "nothing was injected: the request before it takes too long")
        try:
            if why := self.halted():
                raise FaultProblem("refused", thing, why, "ftctl faults allow --reason TEXT")
            self._tidied()
            opened = (*self.open_faults(), *self._elsewhere())
            target = Target(self._node, wish.nic, wish.replica, wish.rank)
            wished = wish_of(fault, wish, target)
            try:
                addresses = addresses_of(self._machine, self._limits, wish)
            except HostError as error:
                raise FaultProblem("failed", thing, f"nothing was injected: {error}") from None
            facts = Facts((), opened, frozenset(), request.here, job, addresses)
            if refusal := blast_radius(wished, facts, self._limits) or reachable(wished, facts, self._limits):
                raise FaultProblem.refused(thing, refusal)
            if cut_off(wished, facts, self._limits):
                dead_man_s = min(CUT_OFF_S, wish.dead_man_s or CUT_OFF_S)
                request = msgspec.structs.replace(request, dead_man_s=dead_man_s)
            with self._proofs(request.workers) as proofs:
                return self._one(request, thing, nothing="nothing was injected", proofs=proofs)
        finally:
            self._gate.release()

    @contextmanager
    def _proofs(self, workers: tuple[Worker, ...]) -> Iterator[list[int]]:
        found = [one for one in map(self._proof, workers[: wire.PROOFS]) if one is not None]
        try:
            yield found
        finally:
            for one in found:
                os.close(one)

    def revert(self, name: str, why: str) -> Entry:
        return self._one(wire.Revert(name[:64], why[:500]), f"fault {name}")

    def revert_all(self, why: str, *, settle: bool = False) -> list[Entry]:
        thing = f"faults of {self._node}"
        if settle:
            if not self._gate.acquire(timeout=ASK_S):
                raise FaultProblem("in-force", thing, "an injection is under way and does not end", HINT)
            self._gate.release()
        return self._several(wire.RevertAll(why[:500]), thing)

    def keep_alive(self, name: str) -> Entry:
        return self._one(wire.KeepAlive(name[:64]), f"fault {name}")

    # --- requests -----------------------------------------------------------------------------------------------------

    def _tidied(self) -> None:
        """Raises FaultProblem. The caller holds the gate."""
        if self._tidy:
            self._several(wire.RevertAll("the agent was started anew"), f"faults of {self._node}")
            self._tidy = False

    def _one(self, request: wire.AnyRequest, thing: str, nothing: str = "", proofs: Sequence[int] = ()) -> Entry:
        reply = self._ask(request, thing, nothing, proofs)
        if not isinstance(reply, wire.One):
            raise FaultProblem("in-force", thing, "the helper answers something else than it was asked", HINT)
        if not (isinstance(request, wire.Inject) and request.dry_run):
            self._keep(reply.stamp, (reply.fault,))
        return reply.fault.entry

    def _several(self, request: wire.RevertAll, thing: str) -> list[Entry]:
        reply = self._ask(request, thing, "")
        if not isinstance(reply, wire.Several):
            raise FaultProblem("in-force", thing, "the helper answers something else than it was asked", HINT)
        self._keep(reply.stamp, reply.faults)
        return [one.entry for one in reply.faults]

    def _ask(self, request: wire.AnyRequest, thing: str, nothing: str, proofs: Sequence[int] = ()) -> wire.AnyReply:
        """Anything but a refusal. `nothing`: what can be said if the request never went out. Raises FaultProblem."""
        try:
            reply = ask(self._path, request, ASK_S, proofs)
        except HelperGone as error:
            code = "failed" if nothing and not error.sent else "in-force"
            said = f"{nothing}: " if code == "failed" else ""
            raise FaultProblem(code, thing, f"{said}ft-agent-helper does not answer: {error}", HINT) from None
        if isinstance(reply, wire.Refused):
            entry = None
            if reply.fault is not None:
                entry = reply.fault.entry
                self._keep(0, (reply.fault,))
            raise FaultProblem(reply.code, reply.thing, reply.reason, reply.hint, entry)
        return reply

    def _keep(self, stamp: int, faults: tuple[wire.Fault, ...]) -> None:
        with self._lock:
            self._stamp = max(self._stamp, stamp)
            self._faults.update({one.entry.id: one for one in faults})

    # --- watching -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        mark, boot, number = "", "", 0
        while not self._ending.is_set():
            try:
                reply = ask(self._path, wire.Look(mark, number), wire.LOOK_S + 5.0)
            except HelperGone as error:
                self._lost(str(error))
                continue
            if not isinstance(reply, wire.Faults) or reply.node != self._node:
                node = f"it is that of node {reply.node}" if isinstance(reply, wire.Faults) else "an unexpected answer"
                self._lost(reply.reason if isinstance(reply, wire.Refused) else node)
                continue
            fresh = boot != reply.boot
            if fresh and boot and number:
                number, boot = 0, reply.boot  # another helper, whose events begin anew: from the first one
                continue
            if not boot:
                number = reply.last_event  # what happened before this agent was there is in the helper's journal
            elif not self._ending.is_set():
                for event in reply.events:
                    self._emit(event.kind, event.object, event.reason)
                number = reply.last_event
            boot = reply.boot
            if self._took(reply):
                mark = reply.mark
            if fresh or self._gone or self._able is None:
                self._found()

    def _took(self, reply: wire.Faults) -> bool:
        """False: something newer is known already, and is not in it."""
        with self._lock:
            if reply.stamp < self._stamp:
                return False
            self._faults = {one.entry.id: one for one in reply.faults}
            self._damaged = reply.damaged
            return True

    def _found(self) -> None:
        try:
            able = ask(self._path, wire.Abilities(), ASK_S)
            if self._tidy:
                with self._gate:
                    self._tidied()
        except HelperGone as error:
            self._lost(str(error))
            return
        except FaultProblem as error:
            self._lost(error.reason)
            return
        with self._lock:
            self._able = able.kinds if isinstance(able, wire.Able) else None
            self._roots = tuple(one.rules() for one in able.protect) if isinstance(able, wire.Able) else ()
        if self._gone:
            self._gone = ""
            self._emit("helper.found", self._node, f"ft-agent-helper answers at {self._path}")

    def _lost(self, reason: str) -> None:
        if self._ending.is_set():
            return
        if self._gone != reason:
            self._gone = reason
            self._emit("helper.lost", self._node, f"ft-agent-helper does not answer: {reason}")
        self._ending.wait(RETRY_S)


def _whole_node(entry: Entry) -> bool:
    known = CATALOG.get(entry.kind)
    return known is not None and known.spec.whole_node
