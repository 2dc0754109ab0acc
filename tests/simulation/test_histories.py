"""Histories told by hand: the ones under "Why not less" in the design, and what people do to a job every day."""

from __future__ import annotations

import pytest

from ftar_core.protocol.config import Detection, JobConfig
from ftar_core.wire.exits import RankExit

from .hand import Hand
from .world import World

DETECTION = Detection(heartbeat_interval_s=0.1, suspect_after_s=0.3, evict_after_s=0.5, max_evictions=0)


def cluster(names: str = "abc", *, start: bool = True, **settings: object) -> Hand:
    """A running job with one replica a letter, before step 1 was reduced: everybody is `lazy`."""
    options: dict[str, float] = {"replicas": len(names), "recovery_wait_s": 2, "gather_s": 0.5, "start_timeout_s": 5}
    config = JobConfig(job="job", **{"detection": DETECTION, **options, **settings})  # type: ignore[arg-type]
    hand = Hand(World(config, quiet=False))
    hand.world.start_server()
    for name in names:
        hand.world.start_life(name)
    hand.lazy = set(names)
    if start:
        hand.pump()
        assert {x.name for x in hand.world.lives if x.epoch is not None} == set(names)
    return hand


def reduce_step(hand: Hand, *without: str) -> None:
    """Everybody but `without` computes the running step; who has everything reports `Done`."""
    hand.lazy -= {x.name for x in hand.world.lives} - set(without)
    hand.pump(until=lambda: all(x.contributed or x.name in without for x in hand.world.lives if x.alive))
    hand.lazy = {x.name for x in hand.world.lives}


def run_steps(hand: Hand, count: int) -> None:
    """Let the job commit `count` more steps, on all living contributors."""
    goal = hand.world.truth.last + count
    hand.lazy.clear()
    assert hand.pump(until=lambda: hand.world.truth.last >= goal), hand.world.history
    hand.lazy = {x.name for x in hand.world.lives}
    hand.pump()


def names_of(hand: Hand, step: int) -> str:
    return "".join(sorted(c[0] for c in hand.world.truth.committed[step]))


def commit_by_c_alone(hand: Hand) -> None:
    """{A,B,C}: A and B are done with step 1 but cut off; C alone commits it in the next epoch, and dies."""
    hand.frozen = {"a", "b", "c"}  # all words are on the way
    hand.lazy.clear()
    hand.slow = {"c"}
    hand.pump()
    hand.lazy = {"a", "b", "c"}
    assert [x.result is not None for x in hand.world.lives] == [True, True, False]
    hand.unconnected = {"a", "b"}
    hand.break_link("a", "b")
    hand.frozen = set()
    hand.slow = set()
    hand.pump()
    hand.lazy = {"a", "b"}
    hand.pump(until=lambda: hand.world.truth.last == 1)
    assert names_of(hand, 1) == "c"
    hand.lazy = {"a", "b", "c"}
    hand.kill("c")


def restart(hand: Hand) -> None:
    """The coordinator dies and comes back; members that can, connect again."""
    hand.world.server.crash("killed")
    hand.world.start_server()


def test_cut_off_members_never_commit_again_what_the_last_one_committed_alone() -> None:
    hand = cluster()
    commit_by_c_alone(hand)
    hand.pump()
    restart(hand)
    hand.unconnected = set()
    hand.pump()
    hand.advance(5)
    # A and B hold a perfectly good result of step 1, and must not use it.
    assert set(hand.world.truth.committed) == {1}
    view = hand.world.server.machine.view(hand.world.now, 0)
    assert view.state == "recovering"
    assert "nobody of epoch" in view.reason
    assert "c" in view.reason


def test_the_same_without_the_record_waits_for_the_member_that_knows() -> None:
    hand = cluster()
    commit_by_c_alone(hand)
    hand.pump()
    hand.world.server.crash("killed")
    hand.world.store.wipe()
    hand.world.start_server()
    hand.unconnected = set()
    for _ in range(3):  # refused by the members for its old term, it claims a newer one
        hand.pump()
        if not any(s.alive for s in hand.world.servers):
            hand.world.start_server()
    hand.advance(5)
    assert set(hand.world.truth.committed) == {1}
    view = hand.world.server.machine.view(hand.world.now, 0)
    assert view.state == "recovering"
    assert "the record is lost" in view.reason
    assert "waiting for c" in view.reason


def drain_and_crash(hand: Hand) -> None:
    """C is drained; the coordinator dies when the commit has reached C alone."""
    hand.world.server.operate("drain", "c")
    hand.lazy.clear()
    hand.deaf = {"a", "b"}
    hand.pump(until=lambda: 1 in hand.world.truth.committed)
    hand.lazy = {"a", "b", "c"}
    hand.pump()
    assert names_of(hand, 1) == "abc"
    hand.world.server.crash("killed")
    for name in "ab":
        link = hand.world.life(name).link
        assert link is not None
        link.cut()  # its words never arrive
    hand.deaf = set()
    hand.world.start_server()


def test_a_crash_in_the_middle_of_a_drain_commits_the_step_once() -> None:
    hand = cluster()
    drain_and_crash(hand)
    hand.pump()
    assert {x.name: len(x.history) for x in hand.world.lives} == {"a": 1, "b": 1, "c": 1}
    run_steps(hand, 2)
    assert names_of(hand, 1) == "abc"
    assert names_of(hand, 2) == "ab"
    drained = hand.world.lives[2]
    assert drained.exit is not None
    assert drained.exit.exit_code == RankExit.DRAINED


def test_a_coordinator_restart_loses_neither_a_replica_nor_a_step() -> None:
    hand = cluster()
    run_steps(hand, 3)
    hand.lazy -= {"a", "b"}
    hand.pump()  # in the middle of step 4
    restart(hand)
    hand.pump()
    run_steps(hand, 2)
    assert [names_of(hand, step) for step in (4, 5)] == ["abc", "abc"]
    assert hand.world.server.machine.job.term.number == 2


def test_a_restart_after_everybody_is_done_commits_the_step_without_reducing_it_again() -> None:
    hand = cluster()
    server = hand.world.server
    hand.lazy.clear()
    server.paused = True
    hand.frozen = {"a", "b", "c"}
    hand.pump()
    assert all(x.result is not None for x in hand.world.lives)
    parts = len(hand.world.ring)
    server.crash("killed")
    hand.frozen = set()
    hand.lazy = {"a", "b", "c"}
    hand.world.start_server()
    hand.pump()
    assert hand.world.truth.last == 1
    assert len(hand.world.ring) == parts


def test_a_killed_replica_costs_one_retry_and_its_batch_is_trained_by_another() -> None:
    hand = cluster()
    run_steps(hand, 2)
    hand.lazy -= {"a", "b"}
    hand.pump()  # a and b have computed step 3; c has not
    hand.kill("c")
    hand.lazy = {"c"}
    hand.pump(until=lambda: hand.world.truth.last == 4)
    assert names_of(hand, 3) == "ab"
    batches = {b for _, _, b in hand.world.truth.committed[4]}
    assert 8 in batches, "the batch that was dealt to c goes first"
    deal = hand.world.deals[hand.world.truth.last + 1]
    hand.world.truth.all_dealt(deal.cursor, set(deal.batches.values()) | set(deal.returned))


def test_a_restarted_replica_catches_up_and_contributes_at_a_boundary() -> None:
    hand = cluster()
    run_steps(hand, 2)
    hand.kill("b")
    run_steps(hand, 2)
    hand.world.start_life("b")
    hand.pump()
    run_steps(hand, 3)
    assert names_of(hand, 4) == "ac"
    assert names_of(hand, hand.world.truth.last) == "abc"
    kinds = [e.kind for e in hand.world.events]  # type: ignore[attr-defined]
    assert kinds.index("replica.lost") < kinds.index("replica.fetching") < len(kinds)
    retries = [e for e in hand.world.events if e.kind == "epoch.new" and "again" in e.reason]  # type: ignore[attr-defined]
    assert len(retries) == 1, "the join repeated no step"


def test_a_drained_replica_leaves_at_a_boundary_and_comes_back_only_when_allowed() -> None:
    hand = cluster()
    run_steps(hand, 1)
    server = hand.world.server
    assert server.operate("drain", "b").code == "ok"
    run_steps(hand, 2)
    assert names_of(hand, 2) == "abc"
    assert names_of(hand, 3) == "ac"
    drained = hand.world.lives[1]
    assert drained.exit is not None
    assert drained.exit.exit_code == RankExit.DRAINED
    again = hand.world.start_life("b")
    hand.pump()
    assert again.exit is not None
    assert again.exit.exit_code == RankExit.DRAINED
    assert server.operate("rejoin", "b").code == "ok"
    hand.world.start_life("b")
    hand.pump()
    run_steps(hand, 3)
    assert names_of(hand, hand.world.truth.last) == "abc"
    assert server.machine.job.table.replicas["b"].slot == 1, "it has its old slot again"


def test_an_evicted_replica_that_was_only_paused_disturbs_nobody() -> None:
    hand = cluster()
    run_steps(hand, 1)
    victim = hand.world.life("c")
    victim.paused = True
    hand.frozen = {"c"}
    hand.world.server.operate("evict", "c")
    run_steps(hand, 2)
    victim.paused = False
    hand.frozen = set()
    hand.lazy.discard("c")
    run_steps(hand, 2)
    assert all(names_of(hand, step) == "ab" for step in (2, 3, 4, 5))
    assert victim.exit is not None
    assert victim.exit.exit_code == RankExit.RESTART


def test_below_min_replicas_the_job_holds_and_goes_on_at_the_same_step() -> None:
    hand = cluster(min_replicas=2)
    run_steps(hand, 2)
    hand.kill("b")
    hand.kill("c")
    hand.lazy.clear()
    hand.pump()
    view = hand.world.server.machine.view(hand.world.now, 0)
    assert (view.state, view.step) == ("holding", 3)
    assert "1 contributing, 2 needed" in view.reason
    assert next(r for r in view.replicas if r.name == "a").state == "blocked"
    hand.world.start_life("b")
    hand.pump(until=lambda: hand.world.truth.last == 4)
    assert names_of(hand, 3) == "ab"
    batches = {c[0]: c[2] for c in hand.world.truth.committed[3]}
    assert batches["b"] == 7, "the new process trains the batch that its name was dealt"
    assert hand.world.server.machine.view(hand.world.now, 0).state == "running"


def test_when_all_contributors_vanish_a_caught_up_spare_goes_on_with_what_is_true() -> None:
    hand = cluster(replicas=3)
    run_steps(hand, 2)
    hand.world.start_life("d")  # a hot spare: the job has all replicas it wants
    hand.pump()
    hand.kill("a", "b", "c")
    hand.lazy = {"d"}
    hand.pump()
    hand.advance(1)
    hand.lazy.clear()
    assert hand.pump(until=lambda: hand.world.truth.last >= 4)
    assert names_of(hand, 3) == "d"


def test_when_the_coordinators_network_blinks_the_members_come_back_as_they_are() -> None:
    hand = cluster()
    run_steps(hand, 2)
    hand.break_link("a", "b", "c")
    hand.unconnected = {"a", "b", "c"}
    hand.pump()
    assert hand.world.server.machine.view(hand.world.now, 0).state == "recovering"
    hand.unconnected = set()
    hand.pump()
    hand.advance(1)
    run_steps(hand, 1)
    assert all(x.exit is None for x in hand.world.lives if x.name == "c"), (
        "the last to vanish is still the same process"
    )


def test_a_full_disk_under_the_record_stops_epochs_but_not_commits() -> None:
    hand = cluster()
    hand.world.store.broken = True
    run_steps(hand, 2)
    hand.kill("c")
    hand.lazy.clear()
    hand.pump()
    view = hand.world.server.machine.view(hand.world.now, 0)
    assert view.state == "holding"
    assert "no space left" in view.reason
    assert hand.world.truth.last == 2
    hand.world.store.broken = False
    hand.lazy = {"a", "b"}
    hand.advance(2)
    hand.lazy.clear()
    assert hand.pump(until=lambda: hand.world.truth.last >= 4)
    assert names_of(hand, 4) == "ab"


def test_a_newcomer_without_the_state_never_carries_the_job_alone() -> None:
    """B joins while the state is still on its way; A, which holds it, is cut off for a moment."""
    hand = cluster("ab")
    run_steps(hand, 2)
    hand.kill("b")
    run_steps(hand, 1)
    newcomer = hand.world.start_life("b")
    hand.pump()
    newcomer.following = False  # the stream stops; the coordinator does not know it
    hand.lazy.clear()
    hand.pump(until=lambda: newcomer.epoch is not None)
    hand.lazy = {"a", "b"}
    hand.pump()
    assert len(newcomer.history) < newcomer.step - 1
    hand.unconnected = {"a"}
    hand.break_link("a")
    hand.pump()
    view = hand.world.server.machine.view(hand.world.now, 0)
    assert view.state == "holding"
    assert "the state has not reached b yet, and a is gone" in view.reason
    hand.unconnected = set()
    hand.pump()
    newcomer.following = True
    run_steps(hand, 2)
    assert all(x.exit is None for x in hand.world.lives if x.alive)
    assert names_of(hand, hand.world.truth.last) == "ab"


def test_the_last_step_ends_everybody_and_then_the_coordinator() -> None:
    hand = cluster(steps=3)
    hand.lazy.clear()
    hand.pump()
    assert hand.world.truth.last == 3
    assert [x.exit.exit_code for x in hand.world.lives if x.exit is not None] == [0, 0, 0]
    stop = hand.world.servers[0].exit
    assert stop is not None
    assert stop.exit_code == 0
    kinds = [e.kind for e in hand.world.events]  # type: ignore[attr-defined]
    assert "replica.lost" not in kinds


def test_a_member_that_missed_the_last_commit_gets_it_when_it_connects_again() -> None:
    hand = cluster(steps=1)
    hand.lazy.clear()
    hand.deaf = {"c"}
    hand.pump(until=lambda: 1 in hand.world.truth.committed)
    hand.break_link("c")
    hand.deaf = set()
    hand.pump()
    assert [x.exit.exit_code for x in hand.world.lives if x.exit is not None] == [0, 0, 0]


@pytest.mark.parametrize("seconds", [0.6, 3.0])
def test_a_silent_replica_is_evicted_but_a_late_coordinator_blames_nobody(seconds: float) -> None:
    from ftar_core.protocol.events import BeatSeen, Tick

    hand = cluster()
    world, server = hand.world, hand.world.server
    links = {x.name: x.link.conn for x in world.lives if x.link is not None}
    for conn in links.values():
        server.feed(BeatSeen(conn, 1, 1, 0, 0))
    if seconds > 1:  # the coordinator itself was away
        world.now += seconds
        server.feed(Tick())
        assert server.machine.job.contributors() == ["a", "b", "c"]
        return
    for _ in range(round(seconds / 0.05)):
        world.now += 0.05
        for name in "ab":
            server.feed(BeatSeen(links[name], 1, 1, 0, 0))
        server.feed(Tick())
    assert server.machine.job.contributors() == ["a", "b"]


def test_many_silent_at_once_are_the_networks_fault() -> None:
    from ftar_core.protocol.events import BeatSeen, Tick

    hand = cluster()
    world, server = hand.world, hand.world.server
    links = {x.name: x.link.conn for x in world.lives if x.link is not None}
    for conn in links.values():
        server.feed(BeatSeen(conn, 1, 1, 0, 0))
    for _ in range(60):
        world.now += 0.05
        server.feed(BeatSeen(links["a"], 1, 1, 0, 0))
        server.feed(Tick())
    job = server.machine.job
    assert job.contributors() == ["a", "b", "c"]
    assert "2 of 3 contributors are silent at once (b, c)" in job.network_trouble
