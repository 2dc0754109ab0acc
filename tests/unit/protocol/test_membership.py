"""Names, slots and incarnations; and the table of states."""

from __future__ import annotations

import pytest

from ftar_core.protocol.membership import (
    ACTIVE,
    GONE,
    SHADOWS,
    TRANSITIONS,
    Cause,
    IllegalTransition,
    Replica,
    State,
    Table,
    first_incarnation,
    natural,
)
from ftar_core.wire.ids import Term


def replica(name: str = "r1", state: State = State.STARTING) -> Replica:
    return Replica(name, state, "", 0.0)


def test_every_state_has_a_way_in_and_a_way_out() -> None:
    reached = {new for (old, _), new in TRANSITIONS.items() if new is not old}
    assert reached == set(State)
    assert {old for (old, _), new in TRANSITIONS.items() if new is not old} == set(State)
    assert set(SHADOWS) | set(ACTIVE) | set(GONE) == set(State)


def test_the_way_of_a_replica_that_dies_and_comes_back() -> None:
    r = replica()
    way = [
        Cause.JOIN,
        Cause.SILENT,
        Cause.WELL,
        Cause.LOST,
        Cause.HELLO,
        Cause.FETCH,
        Cause.REPLAY,
        Cause.READY,
        Cause.JOIN,
    ]
    states = []
    for moment, cause in enumerate(way, 1):
        r.move(cause, float(moment), "why")
        states.append(r.state.value)
    assert states == [
        "contributing", "suspect", "contributing", "unreachable", "starting", "fetching", "replaying", "spare",
        "contributing",
    ]  # fmt: skip
    assert r.since == 9.0


def test_an_illegal_transition_is_a_missing_row() -> None:
    with pytest.raises(IllegalTransition, match="r1: join in state drained"):
        replica(state=State.DRAINED).move(Cause.JOIN, 0.0, "")


def test_gone_replicas_contribute_only_after_a_new_beginning() -> None:
    # The one exception: all contributors vanished, and one of them is back before anything was decided without it.
    assert {s for s in GONE if (s, Cause.JOIN) in TRANSITIONS} == {State.UNREACHABLE}


def test_a_replica_gets_its_old_slot_back() -> None:
    table = Table(Term(1, "x"), slots={"r0": 0, "r1": 1, "r2": 2})
    back = table.ensure("r1", 0.0, "")
    table.give_slots([back], {0, 2})
    assert back.slot == 1


def test_a_spare_moves_into_the_slot_that_a_lost_replica_left() -> None:
    table = Table(Term(1, "x"), slots={"r0": 0, "r1": 1, "r2": 2})
    spare = table.ensure("r9", 0.0, "")
    table.give_slots([spare], {0, 2})
    assert spare.slot == 1
    lost = table.ensure("r1", 0.0, "")
    table.give_slots([lost], {0, 1, 2})
    assert lost.slot == 3


def test_slots_of_connected_replicas_are_not_given_away() -> None:
    table = Table(Term(1, "x"), slots={"r0": 0, "r1": 1})
    owner = table.ensure("r1", 0.0, "")
    table.attach(owner, 7, 0.0)
    new = table.ensure("r5", 0.0, "")
    table.give_slots([new], {0})
    assert new.slot == 2


def test_incarnations_of_two_lives_of_a_coordinator_never_meet() -> None:
    first = Table(Term(1, "a"), next_incarnation=first_incarnation(Term(1, "a"), lost=False))
    minted = [first.mint() for _ in range(1000)]
    assert max(minted) < first_incarnation(Term(2, "a"), lost=False)
    assert first_incarnation(Term(1, "b"), lost=True) not in minted[:1]


def test_names_sort_as_people_count() -> None:
    assert sorted(["r10", "r2", "r1", "node2-r1"], key=natural) == ["node2-r1", "r1", "r2", "r10"]
