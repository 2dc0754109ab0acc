"""The contract of a fault: look, plan, do, look again, undo, look again.

A fault never decides when it runs, for how long, or whether it may: that is agents/injection. It says what it would
change (`plan`: everything needed to take it back, which goes to disk before anything happens), changes it (`inject`),
takes it back (`undo`, which may be called any number of times, by any process, after any crash), and looks at the real
system (`probe`), because a call that returned is no proof that something happened, and one that failed is none that it
did not.

Faults import neither pydantic nor FastAPI: the watchdog loads them in a process that must start and stay small.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import msgspec

from agents.api.faultspecs import Param, ParamValue, Spec
from agents.faults.rhythm import Rhythm
from agents.host.machine import Machine

Params = dict[str, ParamValue]


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a fault is aimed at, by name; the kind of fault says which field it needs."""

    node: str
    nic: str = ""
    replica: str = ""
    rank: int = -1  # of the replica; below 0: all that it has on this node
    gpu: int = -1  # below 0: none

    def __str__(self) -> str:
        rank = f"rank{self.rank}" if self.replica and self.rank >= 0 else ""
        gpu = f"gpu{self.gpu}" if self.gpu >= 0 else ""
        return "/".join(part for part in (self.node, self.nic or self.replica or gpu, rank) if part)


@dataclass(frozen=True)
class Refusal:
    """Why not. `code` is one of agents.api.models.ERROR_CODES; `hint` the next command or the flag that overrides."""

    code: str
    reason: str
    hint: str = ""


@dataclass(frozen=True)
class Probe:
    """What the real system shows. `in_force` None: it cannot be told, which counts as yes."""

    in_force: bool | None
    sentence: str
    spent: bool = False  # not in force any more because it has happened, not because somebody took it back


U = TypeVar("U", bound=msgspec.Struct)


class Fault(ABC, Generic[U]):
    """One kind of fault; stateless, so that agent and watchdog can each hold one. Host failures raise HostError.

    What users are told about it is its entry in agents/api/faultspecs.py.
    """

    spec: ClassVar[Spec]
    survives_boot: ClassVar[bool] = False  # True: its effect is still there after the machine was started anew
    privileged: ClassVar[bool] = False  # True: it needs rights that an agent without root has not (agents/helper)
    undo_type: type[U]

    @property
    def kind(self) -> str:
        return self.spec.kind

    @property
    def summary(self) -> str:
        return self.spec.summary

    @property
    def target(self) -> str:
        return self.spec.target

    @property
    def params(self) -> tuple[Param, ...]:
        return self.spec.params

    @property
    def irreversible(self) -> bool:
        return self.spec.irreversible

    def unsupported(self, machine: Machine) -> str:
        """Why this machine cannot do it; empty if it can."""
        return ""

    def warning(self, machine: Machine, target: Target) -> str:
        """Where it may not hit all that a user expects, and why; empty if there is nothing to say."""
        return ""

    @abstractmethod
    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        """None if it can be done to this target now. Changes nothing."""

    @abstractmethod
    def plan(self, machine: Machine, target: Target, params: Params) -> U:
        """The undo record: all that is needed to take it back, read from the system before the change."""

    def named(self, undo: U, fault_id: str) -> U:
        """The record of the fault that is now called so. Same record by default."""
        return undo

    @abstractmethod
    def inject(self, machine: Machine, undo: U) -> None:
        """Make the change. Reads only the record, so that what is done is what was written down."""

    def settled(self, machine: Machine, undo: U) -> U:
        """The record after the change, narrowed to what the change really took away. Same record by default."""
        return undo

    @abstractmethod
    def undo(self, machine: Machine, undo: U) -> str:
        """Take it back and say what was done. Idempotent; leaves alone what others changed meanwhile."""

    @abstractmethod
    def probe(self, machine: Machine, undo: U) -> Probe:
        """Is it in force?"""

    def rhythm(self, undo: U) -> Rhythm | None:
        """When it comes and goes by itself while it is active; None: it stays. The injector keeps to it: after `inject`
        it calls `undo` for a pause, and `again` and `inject` at the end of one."""
        return None

    def again(self, machine: Machine, undo: U) -> U:
        """The record for another turn after a pause, read anew from the system if that is needed; it is on disk before
        `inject` is called."""
        return undo

    @abstractmethod
    def by_hand(self, undo: U) -> list[str]:
        """Commands with which a person can take it back when the agent could not."""
