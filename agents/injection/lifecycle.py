"""The life of a fault as a table. A move that is not in the table is a bug, not a state.

    armed ----injected----> active
    armed ----done--------> done           (irreversible: it happened, nothing can be taken back)
    armed ----revert------> reverting      (the injection failed or its outcome is unknown: take it back anyway)
    active ---revert------> reverting
    reverting --undone----> reverted
    reverting --gave-up---> stuck          (commands to do it by hand are shown; a later attempt may still succeed)
    stuck ----revert------> reverting

Armed means: the undo is on disk, the change may or may not have been made. So everything from armed to stuck counts as
possibly in force (`OPEN`).
"""

from __future__ import annotations

from enum import Enum

from agents.api.words import FaultState


class Move(str, Enum):
    INJECTED = "injected"
    DONE = "done"
    REVERT = "revert"
    UNDONE = "undone"
    GAVE_UP = "gave-up"


MOVES: dict[tuple[FaultState, Move], FaultState] = {
    (FaultState.ARMED, Move.INJECTED): FaultState.ACTIVE,
    (FaultState.ARMED, Move.DONE): FaultState.DONE,
    (FaultState.ARMED, Move.REVERT): FaultState.REVERTING,
    (FaultState.ACTIVE, Move.REVERT): FaultState.REVERTING,
    (FaultState.REVERTING, Move.REVERT): FaultState.REVERTING,  # whoever was reverting died at it
    (FaultState.REVERTING, Move.UNDONE): FaultState.REVERTED,
    (FaultState.REVERTING, Move.GAVE_UP): FaultState.STUCK,
    (FaultState.STUCK, Move.REVERT): FaultState.REVERTING,
}

OPEN = frozenset({FaultState.ARMED, FaultState.ACTIVE, FaultState.REVERTING, FaultState.STUCK})


class IllegalMove(Exception):
    """A bug: the table has no such row."""


def after(state: FaultState, move: Move) -> FaultState:
    try:
        return MOVES[state, move]
    except KeyError:
        raise IllegalMove(f"a fault that is {state.value} cannot be {move.value}") from None
