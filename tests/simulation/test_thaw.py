"""Frozen, put out, thawed: a life that the job went on without comes back in place, and disturbs nobody (safety D)."""

from __future__ import annotations

from ftar_core.protocol.events import BeatSeen, MemberHello
from ftar_core.wire.exits import RankExit
from ftar_core.wire.heartbeat import Phase
from ftar_core.wire.ids import EpochId
from ftar_core.wire.messages import Catchup

from .hand import Hand
from .test_histories import cluster, names_of, reduce_step, run_steps


def beats(hand: Hand, seconds: float) -> None:
    """Time passes, and everybody who is not frozen sends heartbeats."""
    end = hand.world.now + seconds
    while hand.world.now < end:
        for link in list(hand.world.links):
            life = link.life
            if link.server_open and life.alive and not life.paused:
                link.server.feed(BeatSeen(link.conn, Phase.FORWARD, life.step, 0, 0))
        hand.advance(0.1)


def freeze(hand: Hand, name: str) -> None:
    """SIGSTOP: nothing runs, its connections stay open, what is said to it waits in the kernel's buffer."""
    beats(hand, 0.2)
    hand.world.life(name).paused = True
    hand.frozen.add(name)


def thaw(hand: Hand, name: str) -> None:
    hand.world.life(name).paused = False
    hand.frozen.discard(name)
    hand.pump()


def test_a_frozen_replica_is_put_out_and_comes_back_as_the_same_process() -> None:
    hand = cluster()
    run_steps(hand, 2)
    life = hand.world.life("c")
    before = life.member.incarnation
    freeze(hand, "c")
    beats(hand, 1.0)
    assert hand.world.server.machine.view(hand.world.now, 0).contributors == ("a", "b")
    run_steps(hand, 3)
    assert names_of(hand, 4) == "ab"
    thaw(hand, "c")
    run_steps(hand, 4)
    assert life.exit is None
    assert hand.world.life("c") is life
    assert life.member.incarnation > before
    assert names_of(hand, hand.world.truth.last) == "abc"


def test_it_builds_on_what_it_holds() -> None:
    hand = cluster()
    run_steps(hand, 3)
    freeze(hand, "c")
    beats(hand, 1.0)
    run_steps(hand, 2)
    thaw(hand, "c")
    assert not any("forgets" in line for line in hand.world.history)


def test_at_the_same_step_it_is_back_at_the_next_boundary() -> None:
    """The others have not got on: nothing is missing here."""
    hand = cluster()
    run_steps(hand, 2)
    freeze(hand, "c")
    beats(hand, 1.0)
    thaw(hand, "c")
    assert [r.state for r in hand.world.server.machine.view(hand.world.now, 0).replicas][2] == "spare"
    run_steps(hand, 2)
    assert names_of(hand, hand.world.truth.last) == "abc"


def test_gradients_of_the_void_step_are_never_added() -> None:
    """Frozen with a finished backward; thawed when the others are at the very same step, without it."""
    hand = cluster()
    run_steps(hand, 1)
    reduce_step(hand, "a", "b")
    life = hand.world.life("c")
    assert life.contributed
    freeze(hand, "c")
    beats(hand, 1.0)
    thaw(hand, "c")
    assert not life.contributed
    run_steps(hand, 1)
    assert names_of(hand, 2) == "ab"


def test_a_result_that_others_never_committed_is_dropped() -> None:
    """It held the result of step 2 and was cut off; the others commit step 2 without it, or it would commit alone."""
    hand = cluster()
    run_steps(hand, 1)
    hand.slow = {"a", "b"}
    reduce_step(hand)
    hand.pump()
    assert hand.world.life("c").result is not None
    freeze(hand, "c")
    beats(hand, 1.0)
    hand.slow = set()
    run_steps(hand, 2)
    assert names_of(hand, 2) == "ab"
    thaw(hand, "c")
    run_steps(hand, 3)
    assert names_of(hand, hand.world.truth.last) == "abc"


def test_state_of_another_history_is_not_built_on() -> None:
    """An operator forced the job on without those who knew better: their state is of a history that is no more."""
    hand = cluster()
    run_steps(hand, 3)
    freeze(hand, "c")
    beats(hand, 1.0)
    run_steps(hand, 1)
    server = hand.world.server
    job = server.machine.job
    true_one = job.commits[3]
    job.commits[3] = EpochId(true_one.term, 999)
    thaw(hand, "c")
    assert any("forgets the state after step 3" in line for line in hand.world.history)
    run_steps(hand, 3)
    assert names_of(hand, hand.world.truth.last) == "abc"


def test_state_that_nobody_can_vouch_for_any_more_is_fetched_anew() -> None:
    hand = cluster()
    run_steps(hand, 3)
    freeze(hand, "c")
    beats(hand, 1.0)
    run_steps(hand, 2)
    hand.world.server.crash("killed")
    hand.world.start_server()  # it knows the record, not what was committed before it
    hand.pump()
    run_steps(hand, 1)
    thaw(hand, "c")
    assert any("forgets the state after step 3" in line for line in hand.world.history)


def test_whom_an_operator_evicted_has_to_start_again() -> None:
    hand = cluster()
    run_steps(hand, 1)
    life = hand.world.life("c")
    hand.world.server.operate("evict", "c")
    hand.pump()
    assert life.exit is not None
    assert life.exit.exit_code == RankExit.RESTART


def test_an_evicted_life_that_did_not_hear_it_is_told_when_it_comes_back() -> None:
    hand = cluster()
    run_steps(hand, 1)
    life = hand.world.life("c")
    hand.deaf.add("c")
    hand.world.server.operate("evict", "c")
    hand.break_link("c")
    hand.deaf.clear()
    hand.pump()
    assert life.exit is not None
    assert life.exit.exit_code == RankExit.RESTART


def test_what_an_old_life_says_late_counts_for_nothing() -> None:
    """Words of the old incarnation on the old connection, delivered after the thaw."""
    hand = cluster()
    run_steps(hand, 1)
    freeze(hand, "c")
    old = hand.world.life("c").link
    assert old is not None
    beats(hand, 1.0)
    job = hand.world.server.machine.job
    members = job.epoch.names()
    life = hand.world.life("c")
    hello = next(r.hello for r in job.table if r.name == "c")
    assert hello is not None
    hand.world.server.feed(MemberHello(9999, hello))
    assert job.epoch.names() == members
    thaw(hand, "c")
    assert life.alive
    sent = [m for link in hand.world.links for m in link.down if isinstance(m, Catchup)]
    assert not sent  # all delivered
    run_steps(hand, 2)
