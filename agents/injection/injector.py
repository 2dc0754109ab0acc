"""Carries a fault through its life in this agent: inject, revert, keep alive, time out.

All methods but the views may block (netlink, fsync, another process's lock) and may be called from any thread; the
server calls them off its loop. Deadlines are kept by deadlines.py, which calls `revert_now` here.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping

import msgspec

from agents.api.blast import Blast
from agents.api.protect import Protection
from agents.api.words import FaultState
from agents.faults.catalog import CATALOG, AnyFault
from agents.faults.contract import Params, Refusal, Target
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.injection.beats import Beats
from agents.injection.book import Book, Emit
from agents.injection.guard import CUT_OFF_S, Facts, JobFacts, Limits, OpenFault, check_params, cut_off, judge
from agents.injection.ledger import Damaged, Entry, Ledger, LedgerError
from agents.injection.lifecycle import Move, after
from agents.injection.problems import FaultProblem
from agents.injection.reverting import BACKOFF_S, LOCK_TIMEOUT_S, Reverter
from agents.injection.wish import Injection, addresses_of, asks_the_job, open_fault, wish_of

__all__ = ["Injection", "Injector"]

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{0,64}\Z")


class Injector:
    def __init__(  # noqa: PLR0917
        self,
        ledger: Ledger,
        machine: Machine,
        limits: Limits,
        emit: Emit,
        catalog: Mapping[str, AnyFault] = CATALOG,
        reverter: Reverter | None = None,
        job: Callable[[], JobFacts] = JobFacts,
    ) -> None:
        self._ledger = ledger
        self._machine = machine
        self._limits = limits
        self._emit = emit
        self._catalog = catalog
        self._reverter = reverter or Reverter(ledger, machine, catalog)
        self.book = Book(ledger, emit, limits.node)
        self._job = job
        self._closing = False
        self.whose = "agent"  # what people call this process
        self.elsewhere: tuple[OpenFault, ...] | Callable[[], tuple[OpenFault, ...]] = ()  # open ones of another ledger
        self.here: tuple[str, ...] = ()  # replicas with processes here that the machine does not know
        self.halted: Callable[[], str] = str  # why nothing may be injected here; empty: it may
        self.beats = Beats(ledger, machine, self.book, catalog)

    # --- views (never block) -----------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Open faults and those reverted lately, oldest first."""
        return self.book.entries()

    def find(self, name: str) -> Entry | None:
        """By fault id, or by the request id that made it."""
        return self.book.find(name)

    def damaged(self) -> tuple[Damaged, ...]:
        """Ledger entries that cannot be read: a fault may be in force."""
        return self.book.damaged

    def by_hand(self, entry: Entry) -> list[str]:
        return self._reverter.by_hand(entry)

    def blast(self) -> Blast:
        return self._limits.blast

    def protections(self) -> tuple[Protection, ...]:
        return self._limits.protection

    def unsupported(self, fault: AnyFault) -> str:
        """Why this machine cannot do it; empty if it can."""
        return fault.unsupported(self._machine)

    def trouble(self) -> str:
        """Why faults cannot be carried out: nothing, whoever asks is in the process that does it."""
        return ""

    def open_faults(self) -> tuple[OpenFault, ...]:
        now = self.now_boot_s()
        return tuple(open_fault(entry, now, self._catalog) for entry in self.book.open())

    def now_boot_s(self) -> float:
        return self._machine.clock.boot_s()

    def left_s(self, entry: Entry) -> float:
        """Seconds until it is taken back; 0 for one that is reverted, due, or stuck."""
        return max(0.0, entry.due_boot_s() - self.now_boot_s()) if entry.open else 0.0

    def holds_node(self) -> bool:
        """A fault is open that keeps the whole node down: no replica is to be started."""
        return any(open_fault(entry, 0.0, self._catalog).whole_node for entry in self.book.open())

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take back whatever a predecessor left. Raises LedgerError if there can be no ledger."""
        self._ledger.prepare()
        self.refresh()
        for entry in self.book.open():
            self.revert_now(entry, f"the {self.whose} was started anew")

    def close(self) -> list[Entry]:
        """Take everything back; what is still open afterwards is returned."""
        self._closing = True
        try:
            self.refresh()  # waits for an injection that is under way
        except LedgerError as error:
            self._emit("ledger.failed", self._limits.node, str(error))
        for entry in self.book.open():
            try:
                self.revert_now(entry, f"the {self.whose} ends")
            except LedgerError as error:
                self._emit("fault.stuck", str(entry.target), f"{entry.id}: {error}")
        return self.book.open()

    def inject(self, wish: Injection) -> Entry:
        """The fault, active; or the fault as it would be, for a dry run. Raises FaultProblem."""
        target = Target(self._limits.node, wish.nic, wish.replica, wish.rank)
        fault, params = self._check_form(wish, target)
        target = msgspec.structs.replace(target, gpu=int(params["gpu"])) if "gpu" in params else target
        # Asked before the lock is held: it may take seconds.
        job = self._job() if asks_the_job(fault, wish, self._limits) else JobFacts()
        try:
            with self._ledger.locked(LOCK_TIMEOUT_S):
                self.book.read()
                known = self.find(wish.request_id)
                if known is not None:
                    return known
                entry = self._arm(fault, wish, target, params, job)
                if wish.dry_run:
                    return entry
                try:
                    self._ledger.write(entry)
                except LedgerError:
                    self._ledger.remove(entry.id)
                    raise
                self.book.keep(entry)
                entry = self._make(fault, entry)
        except LedgerError as error:
            raise FaultProblem(
                "ledger",
                str(target),
                f"nothing was injected: its undo could not be written ({error})",
                "make room there, or see to it that this can be written",
            ) from None
        except HostError as error:
            raise FaultProblem("failed", str(target), f"nothing was injected: {error}") from None
        if entry.state in (FaultState.ACTIVE, FaultState.DONE):
            kind = f"fault.{entry.state.value}"
            self._emit(kind, str(target), f"{entry.id} {entry.kind} by {entry.owner}: {entry.detail}")
            return entry
        return self._give_up(entry)

    def revert(self, name: str, why: str) -> Entry:
        """By fault id or request id. Reverting what is reverted is no error. Raises FaultProblem."""
        entry = self.find(name)
        if entry is None:
            # An inject that is under way holds the lock and shows up once we get it; one that is still on its way to us
            # (its sender was interrupted) is refused when it arrives.
            try:
                with self._ledger.locked(LOCK_TIMEOUT_S):
                    self.book.read()
                    entry = self.find(name)
                    if entry is None:
                        self.book.cancel(name)
            except LedgerError as error:
                raise FaultProblem("in-force", f"fault {name}", str(error)) from None
        if entry is None:
            raise FaultProblem("unknown-fault", f"fault {name}", "there is no such fault", "ftctl faults")
        if not entry.open:
            return entry
        try:
            return self.revert_now(entry, why)
        except LedgerError as error:
            raise FaultProblem("in-force", f"fault {entry.id}", f"not reverted: {error}", entry=entry) from None

    def revert_all(self, why: str, *, settle: bool = False) -> list[Entry]:
        """All open faults, each as it is afterwards; with `settle` also one whose injection is under way now. Raises
        FaultProblem if the ledger cannot be used."""
        if settle:
            try:
                self.refresh()
            except LedgerError as error:
                reason = f"not all are taken back: {error}"
                raise FaultProblem("in-force", f"faults of {self._limits.node}", reason) from None
        return [self.revert(entry.id, why) for entry in self.book.open()]

    def keep_alive(self, name: str) -> Entry:
        """The controller is there. Raises FaultProblem."""
        entry = self.find(name)
        if entry is None:
            raise FaultProblem("unknown-fault", f"fault {name}", "there is no such fault", "ftctl faults")
        try:
            with self._ledger.locked(LOCK_TIMEOUT_S):
                current = self._ledger.read_one(entry.id) or entry
                if current.state is not FaultState.ACTIVE:
                    return self.book.keep(current)
                current = msgspec.structs.replace(current, heard_boot_s=self._machine.clock.boot_s())
                self.book.keep(current)
                if current.dead_man_s is not None:
                    self._ledger.write(current)
                return current
        except LedgerError as error:
            raise FaultProblem("ledger", f"fault {entry.id}", str(error), entry=entry) from None

    def revert_now(self, entry: Entry, why: str, tries: int = len(BACKOFF_S)) -> Entry:
        """Revert and tell the events. Raises LedgerError if the ledger cannot be used (nothing was done then)."""
        result = self._reverter.revert(entry.id, why, tries)
        if result is None:
            # Removed on disk: a full disk kept its last record from being written, or a person removed it.
            detail = "reverted; its record is gone"
            clock = self._machine.clock
            result = msgspec.structs.replace(
                entry, state=FaultState.REVERTED, detail=detail, reverted=clock.wall_s(), over_boot_s=clock.boot_s()
            )
        self.book.keep(result)
        if result.state is FaultState.STUCK and entry.state is not FaultState.STUCK:
            self._emit("fault.stuck", str(result.target), f"{result.id} {result.kind}: {result.detail}")
        elif entry.open and not result.open:
            self._emit("fault.reverted", str(result.target), f"{result.id} {result.kind}: {result.detail}")
        return result

    def refresh(self) -> None:
        """See what the watchdog or a person did on disk; forget what is old. Raises LedgerError."""
        with self._ledger.locked(LOCK_TIMEOUT_S):
            self.book.read()
            for entry in self._ledger.prune(tuple(self.book.entries()), self._machine.clock.wall_s()):
                self.book.forget(entry)

    def look(self) -> None:
        """Are active faults still in force? Somebody may have set the link up by hand; one that waited for its moment
        is over when that has come. Raises LedgerError."""
        for entry in self.book.open():
            if entry.state is not FaultState.ACTIVE:
                continue
            resting = entry.id in self.beats.resting
            look = self._reverter.probe(entry)
            sentence = look.sentence if look.in_force else f"not in force any more, by somebody else: {look.sentence}"
            if look.spent:
                self.revert_now(entry, f"it has happened: {look.sentence}", tries=1)
                continue
            if resting:
                sentence = f"comes and goes, in a pause now: {look.sentence}"
            if look.in_force is None:
                sentence = f"may be in force: {look.sentence}"
            if sentence != entry.detail and self.book.find(entry.id) == entry:
                self.book.keep(msgspec.structs.replace(entry, detail=sentence))

    # --- steps --------------------------------------------------------------------------------------------------------

    def _check_form(self, wish: Injection, target: Target) -> tuple[AnyFault, Params]:
        fault = self._catalog.get(wish.kind)
        if fault is None:
            kinds = ", ".join(self._catalog)
            raise FaultProblem(
                "unknown-kind", f"fault kind {wish.kind}", "there is no such fault", f"there are: {kinds}"
            )
        if not REQUEST_ID.match(wish.request_id):
            raise FaultProblem("bad-request", "request_id", "at most 64 letters, digits and ._- are allowed")
        if wish.override and not wish.reason.strip():
            what = f"override of {', '.join(wish.override)}"
            raise FaultProblem("bad-request", what, "a reason is required", "--reason TEXT")
        for given, name in ((wish.nic, "nic"), (wish.replica, "replica")):
            if given and fault.target != name:
                raise FaultProblem("bad-request", f"{fault.kind} on {target}", f"{fault.kind} takes no {name}")
        params = check_params(fault.params, wish.params)
        if isinstance(params, Refusal):
            raise FaultProblem.refused(f"{fault.kind} on {target}", params)
        return fault, params

    def _arm(self, fault: AnyFault, wish: Injection, target: Target, params: Params, job: JobFacts) -> Entry:
        """All checks, and the entry with its undo. Changes nothing."""
        if self.book.cancelled(wish.request_id):
            raise FaultProblem("refused", str(target), "this request was taken back before it arrived", "inject again")
        if self._closing:
            raise FaultProblem("refused", str(target), f"the {self.whose} is ending")
        if why := self.halted():
            raise FaultProblem("refused", str(target), why, "ftctl faults allow --reason TEXT")
        if self.book.damaged:
            first = self.book.damaged[0]
            reason = f"{first.path} cannot be read ({first.reason}): a fault may be in force that nobody can take back"
            raise FaultProblem("refused", str(target), reason, f"look at it, undo it by hand, then rm {first.path}")
        unsupported = fault.unsupported(self._machine)
        if unsupported:
            hint = "ftctl inject --list   # which faults which node can have"
            raise FaultProblem("unsupported", f"{fault.kind} on {target}", unsupported, hint)
        wished, facts = wish_of(fault, wish, target), self._facts(fault, wish, job)
        refusal = judge(wished, facts, self._limits) or fault.check(self._machine, target, params)
        if refusal is not None:
            raise FaultProblem.refused(str(target), refusal)
        dead_man_s = wish.dead_man_s
        if cut_off(wished, facts, self._limits):
            dead_man_s = min(CUT_OFF_S, wish.dead_man_s or CUT_OFF_S)
        name = f"f-{secrets.token_hex(4)}"
        undo = fault.named(fault.plan(self._machine, target, params), name)
        clock = self._machine.clock
        now_boot_s = clock.boot_s()
        return Entry(
            id=name,
            kind=fault.kind,
            target=target,
            params=params,
            owner=wish.owner,
            reason=wish.reason,
            request_id=wish.request_id,
            created=clock.wall_s(),
            duration_s=wish.duration_s,
            boot_id=clock.boot_id(),
            created_boot_s=now_boot_s,
            deadline_boot_s=now_boot_s + wish.duration_s,
            dead_man_s=dead_man_s,
            heard_boot_s=now_boot_s,
            state=FaultState.ARMED,
            detail="would be injected" if wish.dry_run else "about to be injected",
            irreversible=fault.irreversible,
            warning=fault.warning(self._machine, target),
            undo=msgspec.Raw(msgspec.json.encode(undo)),
        )

    def _facts(self, fault: AnyFault, wish: Injection, job: JobFacts) -> Facts:
        opened = (*self.open_faults(), *(self.elsewhere() if callable(self.elsewhere) else self.elsewhere))
        replicas = tuple(sorted({worker.replica for worker in self._machine.workers.all()} | set(self.here)))
        aimed_at_rails = fault.target == "nic" or fault.spec.rails
        addresses = addresses_of(self._machine, self._limits, wish) if aimed_at_rails else ()
        if fault.target != "nic":
            return Facts((), opened, frozenset(), replicas, job, addresses)
        links = self._machine.links
        return Facts(links.nics(), opened, links.default_route_indexes(), replicas, job, addresses)

    def _make(self, fault: AnyFault, entry: Entry) -> Entry:
        """The change itself, under the lock, with the undo on disk. Active, or still armed when it went wrong."""
        undo = msgspec.json.decode(bytes(entry.undo), type=fault.undo_type)
        try:
            fault.inject(self._machine, undo)
        except HostError as error:
            return self.book.keep(msgspec.structs.replace(entry, detail=str(error)))
        look = fault.probe(self._machine, undo)
        if look.in_force is False and not look.spent:
            return self.book.keep(msgspec.structs.replace(entry, detail=f"it did not take effect: {look.sentence}"))
        try:
            undo = fault.settled(self._machine, undo)
        except HostError:
            pass  # the wider record will do: it only cannot tell what others removed meanwhile
        detail = look.sentence if look.in_force or look.spent else f"may be in force: {look.sentence}"
        entry = msgspec.structs.replace(
            entry,
            state=after(entry.state, Move.DONE if fault.irreversible else Move.INJECTED),
            reverted=self._machine.clock.wall_s() if fault.irreversible else None,
            over_boot_s=self._machine.clock.boot_s() if fault.irreversible else None,
            detail=detail,
            undo=msgspec.Raw(msgspec.json.encode(undo)),
        )
        try:
            self._ledger.write(entry)
        except LedgerError as error:
            self._emit("ledger.failed", str(entry.target), f"{entry.id} is active, on disk it is armed: {error}")
        return self.book.keep(entry)

    def _give_up(self, entry: Entry) -> Entry:
        """The injection failed or its outcome is unknown: take it back, and say which of the two it is."""
        why = entry.detail
        target = str(entry.target)
        try:
            entry = self.revert_now(entry, f"the injection failed: {why}")
        except LedgerError as error:
            raise FaultProblem("in-force", target, f"{why}; and not reverted: {error}", entry=entry) from None
        if entry.open:
            hint = f"ftctl revert {entry.id}"
            raise FaultProblem("in-force", target, f"{why}; and {entry.detail}", hint, entry=entry)
        raise FaultProblem("failed", target, f"nothing is in force: {why}", entry=entry)
