"""The few words that both the published contract and the smallest processes need (the watchdog loads no pydantic)."""

from __future__ import annotations

from enum import Enum


class Role(str, Enum):
    """viewer < operator < chaos; a role includes the ones before it."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    CHAOS = "chaos"

    def includes(self, other: Role) -> bool:
        order = list(Role)
        return order.index(self) >= order.index(other)


class Health(str, Enum):
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"


class Action(str, Enum):
    """What a verdict suggests. What is done is decided by the policy."""

    NONE = "none"
    WATCH = "watch"  # record it, do nothing
    CHECK = "check"  # somebody or something has to look: a process, a cable, a register
    RESTART = "restart"  # the replica's processes, on the same nodes
    DRAIN = "drain"  # let the replica leave at a step boundary
    RESET_IDLE = "reset_idle"  # reset the GPU when nothing uses it
    EVICT = "evict"  # take the replica off, until the thing is repaired
    EVICT_NODE = "evict_node"  # the same, for everything on the node


class FaultState(str, Enum):
    """Where a fault is in its life; the moves are a table in agents/injection/lifecycle.py."""

    ARMED = "armed"
    ACTIVE = "active"
    REVERTING = "reverting"
    REVERTED = "reverted"
    STUCK = "stuck"
    DONE = "done"  # of what cannot be undone: it happened, and nothing of it is left to take back

    @property
    def over(self) -> bool:
        """Nothing of it is left to take back."""
        return self in (FaultState.REVERTED, FaultState.DONE)
