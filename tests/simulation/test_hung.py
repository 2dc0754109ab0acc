"""A hung replica, from its standstill to its return: shown, looked at, evicted where that was wished, back in place."""

from __future__ import annotations

from ftar_core.protocol.config import Detection, JobConfig
from ftar_core.protocol.events import BeatSeen
from ftar_core.wire.heartbeat import Phase
from ftar_core.wire.messages import EventView

from .hand import Hand
from .test_histories import names_of, run_steps
from .world import World


def hung_cluster(**detection: object) -> Hand:
    """Three replicas, two steps on, of which c then gets nowhere."""
    settings: dict[str, object] = {"hung_after_s": 1.0, "evidence_wait_s": 0.5, "max_evictions": 0, **detection}
    config = JobConfig(job="job", replicas=3, detection=Detection(**settings))  # type: ignore[arg-type]
    hand = Hand(World(config, quiet=False))
    hand.world.start_server()
    for name in "abc":
        hand.world.start_life(name)
    hand.pump(until=lambda: hand.world.truth.last >= 2)
    hand.lazy = {"c"}
    hand.pump()
    hand.lazy = {"a", "b", "c"}  # what comes next is for the test to let happen
    return hand


def stand_still(hand: Hand, seconds: float, phase: Phase = Phase.FORWARD, *, overdue: bool = False) -> None:
    """Heartbeats go on; a and b have produced all."""
    end = hand.world.now + seconds
    while hand.world.now < end:
        for link in list(hand.world.links):
            life = link.life
            if link.server_open and life.alive:
                mine = life.name == "c"
                now = phase if mine else Phase.REDUCE
                link.server.feed(BeatSeen(link.conn, now, life.step, 0 if mine else 4, 0, None, mine and overdue))
        hand.advance(0.1)


def state(hand: Hand, name: str = "c") -> str:
    view = hand.world.server.machine.view(hand.world.now, 0)
    return next(r.state for r in view.replicas if r.name == name)


def events(hand: Hand, kind: str) -> list[EventView]:
    return [e for e in hand.world.events if isinstance(e, EventView) and e.kind == kind]


def test_it_is_shown_and_stays_in_the_job() -> None:
    hand = hung_cluster()
    stand_still(hand, 2.0)
    assert state(hand) == "hung"
    assert len(events(hand, "replica.hung")) == 1
    stand_still(hand, 5.0)
    assert not events(hand, "replica.evicted")
    run_steps(hand, 1)
    stand_still(hand, 0.2)
    assert state(hand) == "contributing"
    assert names_of(hand, hand.world.truth.last) == "abc"


def test_in_a_phase_with_a_budget_it_is_not_hung_until_the_budget_is_used_up() -> None:
    hand = hung_cluster()
    stand_still(hand, 5.0, Phase.CHECKPOINT)
    assert state(hand) == "contributing"
    stand_still(hand, 2.0, Phase.CHECKPOINT, overdue=True)
    assert len(events(hand, "replica.overdue")) == 1
    assert state(hand) == "hung"


def test_an_agent_is_told_whose_evidence_is_wanted_and_the_event_has_it() -> None:
    hand = hung_cluster()
    stand_still(hand, 2.0)
    (hang,) = hand.world.server.operate("hangs").hangs
    assert (hang.replica, hang.wanted, hang.evicted) == ("c", True, False)
    reply = hand.world.server.operate("evidence", "a")
    assert reply.code == "conflict"
    assert "not hung" in reply.text
    assert hand.world.server.operate("evidence", "c").code == "ok"
    (event,) = events(hand, "replica.evidence")
    assert event.evidence == "test"
    (hang,) = hand.world.server.operate("hangs").hangs
    assert not hang.wanted


def test_with_the_opt_in_it_is_evicted_as_soon_as_the_evidence_is_there() -> None:
    hand = hung_cluster(evict_hung=True, evidence_wait_s=60.0)
    stand_still(hand, 3.0)
    assert state(hand) == "hung", "the evidence comes first"
    hand.world.server.operate("evidence", "c")
    (event,) = events(hand, "replica.evicted")
    assert event.reason.startswith("hung: it has produced 0 buckets of step 3")
    assert event.evidence == "test"
    hand.pump()
    assert hand.world.stood_down == 1
    (hang,) = hand.world.server.operate("hangs").hangs if state(hand) == "evicted" else (None,)
    assert hang is None or hang.evicted
    run_steps(hand, 3)
    assert names_of(hand, hand.world.truth.last) == "abc", "it has woken up"


def test_evidence_that_does_not_come_is_not_waited_for() -> None:
    hand = hung_cluster(evict_hung=True, evidence_wait_s=1.0)
    stand_still(hand, 3.0)
    (event,) = events(hand, "replica.evicted")
    assert not event.evidence


def test_the_limit_of_automatic_evictions_holds_and_says_so() -> None:
    hand = hung_cluster(evict_hung=True, max_evictions=1)
    hand.world.server.machine.job.auto_evictions = [hand.world.now]
    stand_still(hand, 3.0)
    assert not events(hand, "replica.evicted")
    (event,) = events(hand, "replica.eviction-withheld")
    assert "limited to 1 in 10 min" in event.reason
    assert state(hand) == "hung"
