"""A flipped bit, in a result or in a slice of the state: who is named, what follows, and what a restart makes of it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ftar_core.protocol import divergence
from ftar_core.protocol.config import Detection
from ftar_core.protocol.divergence import REDUCED, STATE, judge

from .chaos import Chaos
from .hand import Hand
from .test_histories import cluster, names_of, restart, run_steps
from .truth import ROTATION, Violation

EVICT = Detection(evict_diverged=True, max_evictions=0)


def said(hand: Hand, kind: str) -> list[str]:
    return [e.reason for e in hand.world.events if e.kind == kind]  # type: ignore[attr-defined]


def test_the_majority_is_right_in_each_of_the_two_numbers() -> None:
    assert judge({"a": (1, 5), "b": (1, 5)}).odd == {}
    found = judge({"a": (1, 5), "b": (2, 5), "c": (1, 5), "d": (1, 6)})
    assert (found.odd, found.clear) == ({"b": (REDUCED,), "d": (STATE,)}, True)
    assert not judge({"a": (1, 5), "b": (2, 5)}).clear
    assert not judge({"a": (1, 0), "b": (1, 0), "c": (2, 0), "d": (2, 0)}).clear
    assert not judge({"a": (1, 5), "b": (1, 6), "c": (1, 0)}).clear  # one did not tell
    assert judge({"a": (1, 5), "b": (1, 5), "c": (1, 0)}).odd == {}
    found = judge({"a": (1, 1), "b": (2, 1), "c": (3, 1)})
    assert (set(found.odd), found.clear) == ({"a", "b", "c"}, False)


@pytest.mark.parametrize("where", ["reduced", "state"])
def test_the_odd_one_of_three_is_out_before_the_commit_and_back_with_the_others_state(where: str) -> None:
    hand = cluster(detection=EVICT)
    run_steps(hand, 3)
    odd = hand.world.life("b")
    if where == "reduced":
        odd.spoils = 1
    else:
        odd.flips[4 % ROTATION] = 1
    run_steps(hand, 1)
    assert names_of(hand, 4) == "ac"
    assert odd.exit is not None
    assert odd.exit.exit_code == 75
    (reason,) = said(hand, "replica.diverged")
    assert f"at step 4 its {where} differ from those of the 2 others (digest" in reason
    assert "put out" in reason
    hand.world.start_life("b")
    run_steps(hand, 2)
    run_steps(hand, 2)  # as soon as it has caught up
    assert names_of(hand, hand.world.truth.last) == "abc"
    assert hand.world.life("b").flips == {}
    assert len(said(hand, "replica.diverged")) == 1


def test_without_opting_in_the_others_go_on_and_an_alarm_comes_once_a_rotation() -> None:
    hand = cluster()
    run_steps(hand, 1)
    hand.world.life("b").spoils = 1
    run_steps(hand, 2 * ROTATION + 1)
    assert names_of(hand, hand.world.truth.last) == "abc"
    alarms = said(hand, "replica.diverged")
    assert len(alarms) == 3
    assert "`ftctl evict replica b` makes it fetch theirs" in alarms[0]
    view = hand.world.server.machine.view(hand.world.now, 0)
    assert {r.name: bool(r.diverged) for r in view.replicas} == {"a": False, "b": True, "c": False}
    assert hand.world.server.operate("evict", "b").code == "ok"
    hand.pump()
    hand.world.start_life("b")
    run_steps(hand, 2 * ROTATION)
    assert len(said(hand, "replica.diverged")) == 3
    view = hand.world.server.machine.view(hand.world.now, 0)
    assert not any(r.diverged for r in view.replicas)


def test_a_flip_that_makes_a_copy_infinite_skips_nobodys_update() -> None:
    hand = cluster(fail_on_nonfinite=True)
    run_steps(hand, 1)
    hand.world.life("b").spoils = 1
    hand.world.infinite_flips = True
    run_steps(hand, 1)
    assert hand.world.truth.verdicts[2] == "apply"


def test_two_that_disagree_pause_the_job_until_somebody_decides_also_over_a_restart() -> None:
    hand = cluster("ab", detection=EVICT)
    run_steps(hand, 1)
    hand.world.life("b").flips = dict.fromkeys(range(ROTATION), 1)
    hand.lazy = set()
    hand.pump()
    view = hand.world.server.machine.view(hand.world.now, 0)
    assert view.state == "holding"
    assert "results of step 2 differ between a, b (state): unattributed" in view.reason
    assert "ftctl evict replica R" in view.reason
    restart(hand)
    hand.pump()
    view = hand.world.server.machine.view(hand.world.now, 0)
    assert (view.state, hand.world.truth.last) == ("holding", 1)
    assert hand.world.server.operate("evict", "b", force=True).code == "ok"
    assert hand.pump(until=lambda: hand.world.truth.last == 3)
    assert names_of(hand, 2) == "a"


def test_two_go_on_if_the_operator_wants_that_and_are_told_once_a_rotation() -> None:
    hand = cluster("ab", continue_unattributed=True)
    run_steps(hand, 1)
    hand.world.life("b").flips = dict.fromkeys(range(ROTATION), 1)
    run_steps(hand, ROTATION + 2)
    assert names_of(hand, hand.world.truth.last) == "ab"
    assert len(said(hand, "job.diverged")) == 2


def test_nobody_waits_long_for_what_a_replica_says_about_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    from ftar_core.protocol.member import Member

    hand = cluster(detection=EVICT)
    run_steps(hand, 1)
    heard = Member._received
    monkeypatch.setattr(
        Member, "_received", lambda self, m, now: [] if type(m).__name__ == "Explain" else heard(self, m, now)
    )
    hand.world.life("b").spoils = 1
    hand.lazy = set()
    hand.pump()
    assert hand.world.truth.last == 1
    hand.lazy = {"a", "b", "c"}
    hand.advance(0.6)
    (reason,) = said(hand, "replica.diverged")
    assert f"its {REDUCED} differ from those of the 2 others" in reason


def test_each_ring_votes_for_itself() -> None:
    """Two replicas with a wrong shard each, of different ranks: taken together all three differ."""
    from ftar_core.wire.messages import Explained

    hand = cluster(detection=EVICT)
    run_steps(hand, 1)
    server = hand.world.server
    server.machine.job.ranks = 3
    tables = {"a": [(1, 9), (2, 9), (3, 9)], "b": [(7, 9), (2, 9), (3, 9)], "c": [(1, 9), (2, 9), (8, 9)]}
    for number, name in enumerate("abc", 1):
        hand.world.life(name).spoils = number
    hand.lazy = set()
    hand.pump(until=lambda: server.machine.job.dispute is not None)
    job = server.machine.job
    dispute = job.dispute
    assert dispute is not None
    assert not dispute.judgement.clear
    assert dispute.asked == dict.fromkeys("abc", -1)
    for name, ranks in tables.items():
        answer = Explained(step=dispute.step, epoch=dispute.epoch, rank=-1, ranks=tuple(ranks))
        divergence.on_explained(job, job.table.replicas[name], answer)
    assert dispute.judgement.clear
    assert set(dispute.judgement.odd) == {"b", "c"}
    assert dispute.asked == dict.fromkeys("abc", 0)  # of which the parts are asked


# --- rules broken on purpose ---------------------------------------------------------------------------------------


def worst(seeds: Iterable[int]) -> str:
    for seed in seeds:
        try:
            Chaos(seed).run()
        except Violation as violation:
            return str(violation)
    return ""


BREAKS = {
    "digests are not compared": ("differ", lambda done: False),
    "the state is not compared": ("differ", lambda done: len({d.digest for d in done.values()}) > 1),
    "an alarm is given once for ever": ("rotation", lambda job: 10**9),
    "alarms are not said": ("_alarm", lambda job, name, incarnation, text: None),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_a_rule_that_is_broken_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, instead = BREAKS[broken]
    monkeypatch.setattr(divergence, name, instead)
    assert "E: step" in worst((3, 6, 9, 11))


def test_a_majority_that_is_put_out_instead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the wrong bits go on, and are nobody's difference any more: so this one is seen in the judgement only."""
    hand = cluster(detection=EVICT)
    run_steps(hand, 3)
    hand.world.life("b").spoils = 1
    run_steps(hand, 1)
    assert "b" not in names_of(hand, 4)
