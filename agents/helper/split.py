"""Faults of an agent without rights: what needs them goes to the helper, the rest stays with the agent.

A fault that the agent's own user could make anyway (fill a disk, hold memory, tell its ranks something, end the agent)
has no business in a process with rights. Each side has its own ledger and watchdog; each is told what is open at the
other, so that two faults never meet on one thing and the count is of both.
"""

from __future__ import annotations

from collections.abc import Callable

from agents.api.blast import Blast
from agents.api.protect import Protection
from agents.faults.catalog import CATALOG, AnyFault
from agents.helper.remote import RemoteFaults
from agents.injection.injector import Injection, Injector
from agents.injection.ledger import Damaged, Entry
from agents.injection.problems import FaultProblem


class SplitFaults:
    """A FaultControl of agents/injection/control.py."""

    def __init__(self, local: Injector, remote: RemoteFaults) -> None:
        self._local, self._remote = local, remote
        local.elsewhere = remote.open_faults

    def entries(self) -> list[Entry]:
        return sorted([*self._local.entries(), *self._remote.entries()], key=lambda e: e.created_boot_s)

    def find(self, name: str) -> Entry | None:
        return self._local.find(name) or self._remote.find(name)

    def damaged(self) -> tuple[Damaged, ...]:
        return (*self._local.damaged(), *self._remote.damaged())

    def by_hand(self, entry: Entry) -> list[str]:
        return self._remote.by_hand(entry) if _remote(entry.kind) else self._local.by_hand(entry)

    def left_s(self, entry: Entry) -> float:
        return self._local.left_s(entry)

    def holds_node(self) -> bool:
        return self._local.holds_node() or self._remote.holds_node()

    def trouble(self) -> str:
        return self._remote.trouble()

    def blast(self) -> Blast:
        return self._local.blast()

    def protections(self) -> tuple[Protection, ...]:
        return (*self._local.protections(), *self._remote.protections())

    def unsupported(self, fault: AnyFault) -> str:
        return self._remote.unsupported(fault) if fault.privileged else self._local.unsupported(fault)

    def inject(self, wish: Injection) -> Entry:
        return self._remote.inject(wish) if _remote(wish.kind) else self._local.inject(wish)

    def revert(self, name: str, why: str) -> Entry:
        """Where it is not known yet, both remember that it is not to begin."""
        if self._remote.find(name) is not None:
            return self._remote.revert(name, why)
        try:
            return self._local.revert(name, why)
        except FaultProblem as error:
            if error.code != "unknown-fault":
                raise
        return self._remote.revert(name, why)

    def revert_all(self, why: str, *, settle: bool = False) -> list[Entry]:
        """One side that cannot does not keep the other from it."""
        found: list[Entry] = []
        problems: list[FaultProblem] = []
        sides: tuple[Callable[..., list[Entry]], ...] = (self._remote.revert_all, self._local.revert_all)
        for side in sides:
            try:
                found += side(why, settle=settle)
            except FaultProblem as error:
                problems.append(error)
        if problems:
            raise problems[0]
        return found

    def keep_alive(self, name: str) -> Entry:
        if self._local.find(name) is not None:
            return self._local.keep_alive(name)
        return self._remote.keep_alive(name)

    def start(self) -> None:
        self._local.start()
        self._remote.start()

    def close(self) -> list[Entry]:
        return [*self._local.close(), *self._remote.close()]


def _remote(kind: str) -> bool:
    known = CATALOG.get(kind)
    return known is not None and known.privileged
