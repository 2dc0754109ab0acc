"""Where a job's time went, as it travels: coordinator -> agent -> ftctl. How it is counted: protocol/accounting.py.

Times are whole microseconds, so that the parts add up to the total exactly.
"""

from __future__ import annotations

from enum import Enum

from ftar_core.wire.part import Part


class Category(str, Enum):
    """What a moment of a job was spent on. Each belongs to exactly one; all but the first are losses."""

    PRODUCTIVE = "productive"  # steps that all wanted replicas made, as long as a calm step takes
    STARTING = "starting"  # from the coordinator's start to the first commit
    STALLED = "stalled"  # nothing got on, or a step was longer, and it is known why
    DEGRADED = "degraded"  # the share of a step that missing replicas would have made
    RECOMPUTED = "recomputed"  # made again: a step reduced again, steps since a checkpoint
    SLOW = "slow"  # a step was longer, and nothing is known to have happened


class Loss(str, Enum):
    """Why time was lost. Of several causes of one long step the first in this order counts."""

    # a replica is gone
    KILLED = "killed"  # its connection closed: the process died
    SILENT = "silent"  # no heartbeats: frozen, or its node is gone
    HUNG = "hung"  # alive, and did not get on
    UNREACHABLE = "unreachable"  # no rail to its neighbours works
    DIVERGED = "diverged"  # its result differed, or nobody can say whose is wrong
    EVICTED = "evicted"  # by an operator
    LEFT = "left"  # it ended by itself and said so
    # nobody gets on
    VANISHED = "vanished"  # all contributors are gone
    MIN_REPLICAS = "min-replicas"  # held: fewer contribute than are needed
    RECORD = "record"  # the coordinator's disk: no new epoch can be written down
    COORDINATOR = "coordinator"  # it was down, or found out what is true after that
    RESTART = "restart"  # steps since the checkpoint that the job began again from
    # somebody comes or goes
    DRAINED = "drained"
    REJOIN = "rejoin"  # a replica joined, or catches up
    LINK = "link"  # a rail went down
    # what the replicas do themselves
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    COMPILE = "compile"  # also the first steps of a process
    STRAGGLER = "straggler"  # one computes longer than the others, step after step
    NONFINITE = "non-finite"  # gradients were not finite: the step was skipped
    ABSENT = "absent"  # a replica that is wanted has never come


class Spent(Part, frozen=True):
    """`cause` is empty where none belongs to the category (productive, starting, slow). `count`: of productive and
    degraded the steps; else how often it happened."""

    category: Category
    cause: Loss | None = None
    us: int = 0
    count: int = 0


class AccountView(Part, frozen=True):
    """`total_us` is the sum of `spent`, to the microsecond. It goes up to the last commit, or to this moment where no
    step runs; `late` is what the running step is longer than a calm one by now: not in `spent` yet."""

    since: float  # unix seconds: the start of the job's first coordinator
    total_us: int
    spent: tuple[Spent, ...]
    calm_us: int | None = None  # a calm step: the median that others are compared with
    late: Spent | None = None

    @property
    def effective(self) -> float | None:
        """Productive time by all time; None before anything is counted."""
        productive = sum(entry.us for entry in self.spent if entry.category is Category.PRODUCTIVE)
        return productive / self.total_us if self.total_us else None


__all__ = ["AccountView", "Category", "Loss", "Spent"]
