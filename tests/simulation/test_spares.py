"""Hot spares: a replica that leaves is replaced at the next boundary, in its slot, and nothing else changes.

The seeded part lets the cluster settle between incidents, and then a checker that sees only what is committed demands
that contributors were fewer in the step of a loss only, and never after a drain.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ftar_core.protocol.events import ShadowAt

from .chaos import Chaos
from .conftest import DEFAULT_SEEDS
from .hand import Hand
from .life import Life
from .test_histories import cluster, names_of, restart, run_steps
from .truth import Violation

SHARE = 20  # of the seeds, one in so many is run here


def with_spares(names: str = "abc", spares: str = "d", **settings: float) -> Hand:
    """A running job and its hot spares, at the beginning of step 3."""
    hand = cluster(names, **settings)
    for name in spares:
        hand.world.start_life(name)
    run_steps(hand, 2)
    return hand


def slots(hand: Hand) -> dict[str, int]:
    return {m.replica: m.slot for m in hand.world.server.machine.job.epoch.members}


def said(hand: Hand, kind: str) -> list[str]:
    return [f"{e.object} {e.reason}" for e in hand.world.events if e.kind == kind]  # type: ignore[attr-defined]


def test_a_lost_contributor_is_replaced_from_the_next_step_on_in_its_slot() -> None:
    hand = with_spares()
    hand.lazy = {"c"}
    hand.pump()  # step 3 is waited for by a and b
    hand.kill("b")
    hand.lazy = {"a", "b", "c", "d"}
    run_steps(hand, 3)
    assert [names_of(hand, step) for step in (2, 3, 4, 5)] == ["abc", "ac", "acd", "acd"]
    assert slots(hand) == {"a": 0, "d": 1, "c": 2}
    assert said(hand, "replica.promoted") == [
        "d promoted into slot 1 because b was lost (connection closed: connection reset)"
    ]
    batches = hand.world.truth.committed[4]
    assert {r: b for r, _, b in batches}["a"] == 7, "the batch of b goes back and is dealt first"


def test_the_replica_that_was_lost_comes_back_as_the_new_spare() -> None:
    hand = with_spares()
    hand.kill("b")
    run_steps(hand, 2)
    hand.world.start_life("b")
    run_steps(hand, 2)
    view = {r.name: r for r in hand.world.server.machine.view(hand.world.now, 0).replicas}
    assert (view["b"].state, view["d"].state) == ("spare", "contributing")
    assert "hot spare: the job has all 3 replicas" in view["b"].reason
    assert "promoted into slot 1 because b" in view["d"].reason
    hand.kill("c")
    run_steps(hand, 2)
    assert slots(hand) == {"a": 0, "d": 1, "b": 2}


def test_a_drain_with_a_spare_is_seen_by_nobody() -> None:
    hand = with_spares()
    reply = hand.world.server.operate("drain", "b")
    assert reply.text == "b leaves behind the commit of step 3 and d takes its place"
    hand.pump()  # the links of the next membership come up while step 3 is computed
    run_steps(hand, 3)
    assert [names_of(hand, step) for step in (2, 3, 4, 5)] == ["abc", "abc", "acd", "acd"]
    assert slots(hand) == {"a": 0, "d": 1, "c": 2}
    for step in (3, 4, 5):
        assert list(hand.world.deals[step].batches.values()) == [3 * step - 3, 3 * step - 2, 3 * step - 1]
    assert "because b was drained (test (ann))" in said(hand, "replica.promoted")[0]


def test_a_drain_that_min_replicas_would_forbid_is_allowed_if_a_spare_is_there() -> None:
    hand = with_spares("ab", "c", min_replicas=2)
    assert hand.world.server.operate("drain", "a", dry_run=True).text.endswith(
        "and c would take its place; nothing would be lost"
    )
    assert hand.world.server.operate("drain", "a").code == "ok"
    hand.pump()
    run_steps(hand, 2)
    assert names_of(hand, hand.world.truth.last) == "bc"
    assert hand.world.server.operate("drain", "b").code == "refused", "no spare is left"


def test_two_drains_with_one_spare_leave_together_and_the_spare_comes() -> None:
    hand = with_spares(min_replicas=2)
    hand.world.server.operate("drain", "b")
    hand.world.server.operate("drain", "c")
    hand.pump()
    run_steps(hand, 2)
    assert [names_of(hand, step) for step in (3, 4)] == ["abc", "ad"]
    assert slots(hand) == {"a": 0, "d": 1}
    assert [batch for _, _, batch in sorted(hand.world.truth.committed[4])] == [9, 10]


def test_a_drain_does_not_wait_for_ever_for_a_spare_that_cannot_be_reached() -> None:
    hand = with_spares()
    hand.frozen = {"d"}
    hand.world.server.operate("drain", "b")
    run_steps(hand, 2)
    assert names_of(hand, 4) == "abc"
    hand.advance(hand.world.config.prepare_s)
    run_steps(hand, 2)
    assert names_of(hand, hand.world.truth.last) == "ac"
    assert any("no answer from" in text for text in said(hand, "replica.join-delayed"))


def test_the_commit_of_the_lost_step_waits_for_a_spare_but_not_for_ever() -> None:
    hand = with_spares()
    spare = hand.world.life("d")
    hand.frozen = {"d"}
    hand.kill("b")
    hand.lazy = set()
    hand.pump()
    assert hand.world.truth.last == 2, "all are done with step 3 but the spare may still answer"
    hand.world.now += hand.world.config.promote_wait_s + 0.01
    assert hand.pump(until=lambda: hand.world.truth.last >= 3)
    assert names_of(hand, 3) == "ac"
    hand.lazy, hand.frozen = set("abcd"), set()
    hand.pump()
    run_steps(hand, 2)
    assert spare.epoch is not None
    assert names_of(hand, hand.world.truth.last) == "acd"


def test_a_second_loss_while_a_commit_waits_for_the_spare_makes_it_commit_at_once() -> None:
    hand = with_spares()
    hand.frozen = {"d"}
    hand.kill("b")
    hand.lazy = set()
    hand.pump()
    assert hand.world.truth.last == 2
    hand.kill("c")
    assert hand.pump(until=lambda: hand.world.truth.last == 3)
    assert names_of(hand, 3) == "ac", "both had the result"


def test_a_spare_that_missed_its_source_before_the_coordinator_did_is_waited_for() -> None:
    hand = with_spares()
    spare = hand.world.life("d")
    epoch = spare.history[-1][2]
    spare.feed(ShadowAt(2, epoch, False, "b: connection closed; asking the next source"))
    hand.pump()
    assert not hand.world.server.machine.job.ready
    hand.kill("b")
    hand.lazy = set()
    hand.pump()
    assert hand.world.truth.last == 2, "a and c are done with step 3"
    hand.lazy = set("abcd")
    spare.feed(ShadowAt(2, epoch, True, "following"))
    hand.pump()
    run_steps(hand, 2)
    assert [names_of(hand, step) for step in (3, 4)] == ["ac", "acd"]


def test_a_spare_that_is_gone_is_not_waited_for() -> None:
    hand = with_spares()
    hand.kill("b", "d")
    run_steps(hand, 2)
    assert [names_of(hand, step) for step in (3, 4)] == ["ac", "ac"]


def test_a_returned_replica_that_is_first_does_not_push_the_spare_out_of_the_slot() -> None:
    hand = with_spares()
    hand.kill("b")
    hand.world.start_life("b")  # at once, before the step is reduced again
    run_steps(hand, 3)
    assert sorted(slots(hand).values()) == [0, 1, 2]


@pytest.mark.parametrize(("kept", "behind", "lost"), [(0, 3, 2), (2, 3, 2), (4, 4, 1)])
def test_a_spare_that_was_not_passed_the_last_steps_is_better_than_an_older_checkpoint(
    kept: int, behind: int, lost: int
) -> None:
    """All contributors are killed, and c is two steps behind them. New processes of theirs are there."""
    hand = with_spares("ab", "c", replicas=2)
    world, c = hand.world, hand.world.life("c")
    run_steps(hand, 1)
    world.every = 2 if kept else 0
    c.paused = True
    run_steps(hand, 2)
    if kept:
        history = tuple(world.life("a").history[:kept])
        world.disk[kept] = (history, world.deals[kept + 1])
    hand.kill("a", "b")
    c.paused = False
    hand.pump()
    assert len(c.history) == 3
    assert world.server.machine.job.mode.value == "recovering"
    for name in "ab":
        world.start_life(name)
    hand.pump()
    for life in world.lives:
        if life.may_restore():
            life.restore()
    hand.pump()
    hand.advance(world.config.recovery_wait_s + 1)
    (why,) = [text for text in said(hand, "job.running") if "nobody of epoch" in text]
    step = max(world.truth.committed)
    assert step >= behind
    run_steps(hand, 6)
    assert world.truth.rewound == 1
    if kept <= 3:
        assert f"c goes on behind step {behind}" in why
        assert f"{lost} steps of those who are gone are trained again" in why
        assert ("newer than the checkpoint of step 2" in why) == bool(kept)
    else:
        assert f"behind step {kept} of a checkpoint" in why
    assert names_of(hand, step + 6) in ("ab", "ac", "bc", "abc"), "who came back is in it again"


def test_spares_follow_on_when_the_coordinator_comes_back() -> None:
    hand = with_spares()
    restart(hand)
    hand.pump()
    run_steps(hand, 1)
    hand.kill("a")
    run_steps(hand, 3)
    assert names_of(hand, hand.world.truth.last) == "bcd"
    assert slots(hand)["d"] == 0


def test_the_job_starts_with_the_lowest_names_if_the_spares_come_together_with_them() -> None:
    hand = cluster("dcba", start=False, replicas=3, spares=1)
    hand.lazy = set("abcd")
    hand.pump()
    assert slots(hand) == {"a": 0, "b": 1, "c": 2}
    alone = cluster("dcb", start=False, replicas=3, spares=1)
    alone.pump()
    assert slots(alone) == {}
    alone.advance(alone.world.config.gather_s)
    assert slots(alone) == {"b": 0, "c": 1, "d": 2}, "and does not wait long for them"


# --- seeded --------------------------------------------------------------------------------------------------------


class Incidents(Chaos):
    """Kills and drains, one after the other, each when the cluster is whole and its spares are ready."""

    def __init__(self, seed: int, *, quiet: bool = True) -> None:
        super().__init__(seed, quiet=quiet, rounds=(0,), every=(0,))
        rng = self.rng = random.Random(seed)
        self.wanted, self.extra = rng.choice((2, 3, 4)), rng.choice((1, 1, 2))
        self.names = [f"r{i}" for i in range(self.wanted + self.extra)]
        world = self.world
        # Here only the incidents are to decide, not how long the drawn schedule lets somebody wait.
        patient = {"prepare_s": 30.0, "promote_wait_s": 30.0, "min_replicas": 1, "start_timeout_s": 30.0}
        world.config = replace(world.config, replicas=self.wanted, spares=self.extra, **patient)  # type: ignore[arg-type]
        world.servers[0].alive = False
        world.lives.clear()
        world.links.clear()
        self.restarts.clear()
        world.store.number = 0
        world.start_server()
        for name in self.names:
            world.start_life(name)
        world.finite = lambda step, result: True
        self.flips_left = 0
        self.drains_only = rng.random() < 0.3
        self.short: dict[int, int] = {}  # incident -> steps that were committed with fewer
        self.drained: list[str] = []

    def contributing(self) -> list[Life]:
        last = {c[:2] for c in self.world.truth.committed.get(self.world.truth.last, ())}
        return [x for x in self.world.lives if x.alive and (x.name, x.member.incarnation) in last]

    def spares(self) -> list[Life]:
        """Alive, connected, outside, with the state of the last committed step, and told so."""
        inside = self.contributing()
        last = self.world.truth.last
        return [x for x in self.world.lives if x.alive and x not in inside and x.member.shadow and x.told == last]

    def settle(self, limit: int = 20_000) -> None:
        goal = self.world.truth.last + 2
        for _ in range(limit):
            self._one()
            if self.world.truth.last < goal or any(link.up or link.down for link in self.world.links):
                continue
            if len(self.contributing()) == self.wanted and len(self.spares()) == self.extra:
                return
        raise Violation(f"liveness: {[str(x) for x in self.contributing()]}, spares {[str(x) for x in self.spares()]}")

    def incident(self) -> None:
        rng, world = self.rng, self.world
        before, until = world.truth.last, 0
        victim = rng.choice(self.contributing())
        if self.drains_only or rng.random() < 0.4:
            world.say(f"!! drain {victim}")
            assert world.server.operate("drain", victim.name).code == "ok"
            allowed = 0
        else:
            world.say(f"!! {victim} dies")
            victim.die(clean=rng.random() < 0.5)
            allowed = 1
        until = before + 6
        for _ in range(20_000):
            self._one()
            if world.truth.last >= until:
                break
        counts = {s: len(world.truth.committed[s]) for s in range(before + 1, world.truth.last + 1)}
        fewer = [s for s, count in counts.items() if count < self.wanted]
        if world.truth.last < until or len(fewer) > allowed:
            raise Violation(f"{len(fewer)} steps had fewer contributors than {self.wanted}: {counts}")
        if world.server.operate("rejoin", victim.name).code == "ok":
            self.restarts.append((world.now, victim.name))

    def go(self) -> None:
        for _ in range(4):
            self.settle()
            if self.rng.random() < 0.2:
                self.world.say("!! the coordinator is killed")
                self.world.server.crash("killed")
                self.world.start_server()
                self.settle()
            self.incident()
        for lives in self.world.truth.epochs.values():
            assert len(lives) <= self.wanted
        for epoch in {x.epoch.id: x.epoch for x in self.world.lives if x.epoch is not None}.values():
            assert {m.slot for m in epoch.members} <= set(range(self.wanted)), "no slot beyond the job's replicas"
        if self.drains_only:
            for step, deal in self.world.deals.items():
                first = self.wanted * (step - 1)
                assert list(deal.batches.values()) == list(range(first, first + self.wanted)), f"step {step}"
        self._account()


@pytest.mark.parametrize("part", range(2))
def test_while_a_spare_is_ready_contributors_are_fewer_in_the_step_of_a_loss_only(
    part: int, request: pytest.FixtureRequest
) -> None:
    seeds = request.config.getoption("seeds", DEFAULT_SEEDS) // SHARE
    first = request.config.getoption("first_seed", 0)
    for seed in range(first + part, first + seeds, 2):
        try:
            Incidents(seed).go()
        except Exception as error:
            again = Incidents(seed, quiet=False)
            with pytest.raises(type(error)):
                again.go()
            story = "\n".join(again.world.history[-120:])
            raise Violation(f"seed {seed}: {error}\n{story}") from error


def test_what_follows_from_an_incident_carries_its_id_until_the_replica_or_a_spare_is_back() -> None:
    hand = with_spares()
    server = hand.world.server
    assert server.operate("evict", "b", rejoin=False, incident="i-1", injected=True).code == "ok"
    hand.pump()
    run_steps(hand, 2)
    chain = [(e.kind, e.object, e.action, e.injected) for e in hand.world.events if e.incident == "i-1"]
    epoch = [entry for entry in chain if entry[0] == "epoch.new"]
    assert [entry for entry in chain if entry not in epoch] == [
        ("replica.evicted", "b", "evict", True),
        ("replica.promoted", "d", "evict", True),
        ("replica.joined", "d", "evict", True),
    ]
    assert len(epoch) == 2  # without b, and with d
    server.operate("rejoin", "b", incident="i-1", injected=True)
    hand.world.start_life("b")
    run_steps(hand, 2)
    chain = [(e.kind, e.object, e.action, e.injected) for e in hand.world.events if e.incident == "i-1"]
    assert chain[-1] == ("replica.caught-up", "b", "rejoin", True)  # a spare now
    told = len(hand.world.events)
    hand.kill("c")
    run_steps(hand, 2)
    assert any(e.kind == "replica.promoted" for e in hand.world.events[told:])
    assert not any(e.incident for e in hand.world.events[told:]), "this is another story"


def test_a_restart_that_is_announced_is_a_chain_too() -> None:
    hand = with_spares("abc", "")
    server = hand.world.server
    assert server.operate("restarts", "x", incident="i-2").code == "unknown"
    assert server.operate("restarts", "b", incident="i-2").code == "ok"
    hand.kill("b")
    run_steps(hand, 2)
    hand.world.start_life("b")
    hand.pump()
    run_steps(hand, 4)
    chain = [(e.kind, e.object) for e in hand.world.events if e.incident == "i-2"]
    assert chain[0] == ("replica.lost", "b")
    assert chain[-1][0] == "epoch.new"
    assert ("replica.joined", "b") in chain
    assert {e.action for e in hand.world.events if e.incident == "i-2"} == {"restart"}


def test_of_two_that_ask_in_one_moment_the_second_hears_that_too_many_would_be_out() -> None:
    """Two nodes' policies looked at the job, saw that one may go, and ask."""
    hand = with_spares("abc", "")
    server = hand.world.server
    assert server.operate("drain", "b", max_share=0.34).code == "ok"
    refused = server.operate("evict", "c", max_share=0.34, force=True)
    assert (refused.code, refused.text) == (
        "refused",
        "2 of 3 replicas would be out, at most 34% may be at one time",
    )
    assert server.operate("drain", "c", max_share=0.0).code == "ok", "an operator sets no such limit"


def test_a_spare_makes_up_for_whoever_goes() -> None:
    hand = with_spares()
    server = hand.world.server
    assert server.operate("drain", "b", max_share=0.2).code == "ok"
    assert server.operate("drain", "c", max_share=0.2).code == "refused"
