"""Breaking each rule on purpose: the history that needs it goes well with the rule, and is caught without it.

A rule is broken by patching the machine from outside; nothing in the product knows of it. Each case is a history that
asserts its good end (or trips a checker), and a way to break one rule. Names: ftar_core/protocol/recovery.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ftar_core.protocol import commit, joins, recovery, sampler, settle
from ftar_core.protocol.coordinator import Coordinator
from ftar_core.protocol.effects import Persist
from ftar_core.protocol.events import OutdatedSeen
from ftar_core.protocol.job import Job
from ftar_core.protocol.member import Member
from ftar_core.protocol.record import Claim, Record
from ftar_core.protocol.recovery import Basis, Standing
from ftar_core.wire.ids import NO_EPOCH, NO_TERM, EpochId, Term
from ftar_core.wire.messages import Deal, Done, EpochInfo, Report

from .hand import Hand
from .server import Server, Store
from .test_histories import cluster, commit_by_c_alone, drain_and_crash, names_of, restart, run_steps

Patch = Callable[[pytest.MonkeyPatch], None]


# --- the histories -------------------------------------------------------------------------------------------------


def _goes_on(hand: Hand, steps: int = 2) -> None:
    goal = hand.world.truth.last + steps
    lazy, hand.lazy = hand.lazy, set()
    assert hand.pump(until=lambda: hand.world.truth.last >= goal), "the job does not go on"
    hand.lazy = lazy


def a_restart_with_one_member_dead() -> None:
    hand = cluster()
    run_steps(hand, 2)
    hand.kill("c")
    restart(hand)
    hand.pump()
    hand.advance(3)
    _goes_on(hand)


def c_committed_alone() -> None:
    hand = cluster()
    commit_by_c_alone(hand)
    hand.pump()
    restart(hand)
    hand.unconnected = set()
    hand.lazy = set()
    hand.pump(until=lambda: hand.world.truth.last > 1)
    hand.advance(5)
    hand.pump(until=lambda: hand.world.truth.last > 1)


def c_committed_alone_and_the_record_is_lost() -> None:
    hand = cluster()
    commit_by_c_alone(hand)
    hand.pump()
    hand.world.server.crash("killed")
    hand.world.store.wipe()
    hand.world.start_server()
    hand.unconnected = set()
    hand.lazy = set()
    for _ in range(3):
        hand.pump(until=lambda: hand.world.truth.last > 1)
        if not any(s.alive for s in hand.world.servers):
            hand.world.start_server()
    hand.advance(5)


def a_drain_and_a_crash() -> None:
    hand = cluster()
    drain_and_crash(hand)
    hand.pump()
    run_steps(hand, 1)
    assert names_of(hand, 1) == "abc"


def _all_but_c_are_done(hand: Hand) -> None:
    """Everybody has contributed to step 1, and A and B hold its result."""
    hand.frozen = {"a", "b", "c"}
    hand.lazy.clear()
    hand.slow = {"c"}
    hand.pump()
    hand.lazy = {"a", "b", "c"}


def a_second_coordinator_while_the_first_lives() -> None:
    hand = cluster()
    first = hand.world.server
    _all_but_c_are_done(hand)
    second = hand.world.start_server()
    hand.target = second
    hand.break_link("a", "b")  # they turn to the second
    hand.frozen = {"a", "b"}
    hand.slow = set()
    hand.unconnected = {"c"}
    hand.lazy.discard("c")
    hand.pump(until=lambda: hand.world.truth.last == 1)  # does the first let C commit alone?
    hand.lazy = {"a", "b", "c"}
    if hand.world.truth.last == 1:
        hand.kill("c")
    hand.frozen = set()
    hand.unconnected = set()
    hand.pump()
    hand.advance(3)
    assert not first.alive
    _goes_on(hand)


def a_recovery_that_commits_and_dies() -> None:
    """A alone holds the result of step 1; the coordinator that recovers with it dies at once, and A with it."""
    hand = cluster()
    hand.frozen = {"a", "b", "c"}
    hand.lazy.clear()
    hand.slow = {"b", "c"}
    hand.pump()
    hand.lazy = {"a", "b", "c"}
    hand.world.server.crash("killed")
    hand.unconnected = {"b", "c"}
    hand.frozen = set()
    hand.world.start_server()
    hand.pump()
    hand.advance(3)
    assert len(hand.world.life("a").history) == 1
    hand.kill("a")
    hand.world.server.crash("killed")
    hand.world.start_server()
    hand.unconnected = set()
    hand.pump()
    hand.advance(3)
    hand.lazy, hand.slow = set(), set()
    hand.pump(until=lambda: hand.world.truth.last > 1)
    assert hand.world.truth.last == 1


def two_stores() -> None:
    """A coordinator starts elsewhere, with an empty store, while the first lives; C hears both."""
    hand = cluster(steps=2)
    first = hand.world.server
    other = Store(fresh=False)
    second = hand.world.start_server(other)
    hand.target = second
    hand.break_link("a", "b", "c")
    hand.frozen = set()
    hand.pump()  # all report to the second, and it begins a new epoch
    hand.break_link("c")
    hand.target = first
    hand.pump()  # C goes back to the first, if it lets itself be led by it
    hand.advance(1)
    hand.lazy.clear()
    hand.pump()
    assert hand.world.truth.last == 2


def a_step_that_is_reduced_again() -> None:
    hand = cluster()
    run_steps(hand, 1)
    hand.lazy -= {"b", "c"}
    hand.pump()
    hand.kill("a")
    _goes_on(hand, 3)
    deal = hand.world.deals[hand.world.truth.last + 1]
    hand.world.truth.all_dealt(deal.cursor, set(deal.batches.values()) | set(deal.returned))


def a_recovery_in_the_middle_of_a_step() -> None:
    hand = cluster()
    run_steps(hand, 1)
    hand.lazy -= {"b", "c"}
    hand.pump()
    hand.kill("a")
    hand.frozen = {"b", "c"}
    hand.lazy = {"b", "c"}
    restart(hand)
    hand.frozen = set()
    hand.pump()
    hand.advance(3)
    _goes_on(hand, 3)
    deal = hand.world.deals[hand.world.truth.last + 1]
    hand.world.truth.all_dealt(deal.cursor, set(deal.batches.values()) | set(deal.returned))


def a_store_that_begins_anew_with_low_terms() -> None:
    hand = cluster()
    run_steps(hand, 1)
    restart(hand)
    hand.pump()
    hand.world.server.crash("killed")
    hand.world.store.wipe()
    for _ in range(3):
        if not any(s.alive for s in hand.world.servers):
            hand.world.start_server()
        hand.pump()
    _goes_on(hand)


def an_old_copy_of_the_record() -> None:
    """The store comes back from a backup: C, cut off since, is recorded in it and done with step 1."""
    hand = cluster()
    old = hand.world.store.record
    hand.frozen = {"a", "b", "c"}
    hand.lazy.clear()
    hand.slow = {"a", "b"}
    hand.pump()
    hand.lazy = {"a", "b", "c"}
    hand.unconnected = {"c"}
    hand.break_link("c")
    hand.frozen, hand.slow = set(), set()
    hand.pump()
    run_steps(hand, 1)
    assert names_of(hand, 1) == "ab"
    hand.kill("a")
    hand.world.server.crash("killed")
    hand.world.store.record = old
    hand.unconnected = set()
    hand.world.start_server()
    hand.pump()
    hand.advance(3)
    assert len(hand.world.life("c").history) == 0


def a_restart_that_loses_nobody() -> None:
    hand = cluster()
    run_steps(hand, 1)
    hand.unconnected = {"b", "c"}
    restart(hand)
    hand.pump()
    hand.unconnected = set()
    hand.pump()
    _goes_on(hand)
    assert all(x.exit is None for x in hand.world.lives)
    assert hand.world.stood_down == 0  # nor out for a moment


def the_first_one_lost_comes_back_alone() -> None:
    hand = cluster()
    run_steps(hand, 1)
    hand.unconnected = {"a", "b", "c"}
    for name in "abc":
        hand.break_link(name)
        hand.pump()
    hand.kill("b", "c")
    hand.unconnected = set()
    hand.pump()
    hand.advance(1)
    _goes_on(hand)


def one_is_slower_than_the_others() -> None:
    hand = cluster()
    hand.slow = {"c"}
    hand.lazy.clear()
    hand.pump(until=lambda: hand.world.truth.last >= 1)
    hand.slow = set()
    hand.pump(until=lambda: hand.world.truth.last >= 2)
    assert all(x.exit is None for x in hand.world.lives), "somebody was told to commit what it does not hold"
    assert hand.world.truth.last >= 2


def a_join_that_is_cancelled() -> None:
    hand = cluster("abc", replicas=4, min_replicas=1, start=False)
    hand.advance(6)
    run_steps(hand, 1)
    hand.world.start_life("d")
    hand.frozen = {"c"}  # never says Prepared
    hand.pump()
    hand.world.life("d").die()
    hand.frozen = set()
    hand.pump()
    hand.kill("c")
    _goes_on(hand)


def everybody_leaves_a_paused_coordinator() -> None:
    """See test_rules in the model: the first coordinator's words must not count once the second was heard."""
    hand = cluster()
    first = hand.world.server
    _all_but_c_are_done(hand)
    first.paused = True
    second = hand.world.start_server()
    hand.target = second
    for life in hand.world.lives:
        life.hang_up()
        life.connect(second)
    hand.frozen = set()
    hand.slow = set()
    hand.pump()
    # They have promised themselves to the second. The first comes back and would lead them again.
    old = Member._challenged
    for life in hand.world.lives:
        effects = old(life.member, first.term)
        assert type(effects[0]).__name__ == "SendOutdated", f"{life} lets itself be led by the first again"


def a_done_of_another_epoch() -> None:
    """The record is lost. A committed step 1 in epoch 1.2; B, in the same last epoch 1.3, is done with it in 1.1."""
    settled = recovery.decide(None, _reports_that_need_lastep(), waited=True)
    assert isinstance(settled, recovery.Settled)
    assert "b" not in settled.behind, "B would commit step 1 with the result of another epoch"


def _reports_that_need_lastep() -> dict[str, Standing]:
    term = Term(1, "x")
    first, second, third = (EpochId(term, n) for n in (1, 2, 3))
    common = {"members": ("a", "b"), "incarnations": (1, 2), "promised": term}
    deal = Deal(batches={"a": 2, "b": 3}, cursor=4)
    ahead = Report(step=2, epoch=third, last_commit_epoch=second, deal=deal, **common)  # type: ignore[arg-type]
    behind = Report(step=1, epoch=first, done=True, deal=deal, **common)  # type: ignore[arg-type]
    done = Done(step=1, epoch=first, digest=1, finite=True)
    return {"a": Standing(1, ahead), "b": Standing(2, behind, done)}


# --- breaking the rules --------------------------------------------------------------------------------------------


def no_record(patch: pytest.MonkeyPatch) -> None:
    honest = settle.begin

    def begin(job: Job, fresh: bool, now: float) -> None:
        job.record = None
        honest(job, fresh, now)

    patch.setattr(settle, "begin", begin)


def any_subset_settles(patch: pytest.MonkeyPatch) -> None:
    honest = recovery._without_record
    patch.setattr(recovery, "_without_record", lambda standings, force: honest(standings, True))


class Everybody(set[tuple[str, int]]):
    def __contains__(self, life: object) -> bool:
        return True


def anybody_settles(patch: pytest.MonkeyPatch) -> None:
    honest = Basis.lives
    patch.setattr(Basis, "lives", lambda self: Everybody(honest(self)))


def no_first_step(patch: pytest.MonkeyPatch) -> None:
    def of(cls: type[Basis], record: Record) -> Basis:
        return Basis(record.epoch, 1, record.deal, NO_EPOCH)

    patch.setattr(Basis, "of", classmethod(of))


def no_fence(patch: pytest.MonkeyPatch) -> None:
    honest = Store.write

    def write(self: Store, record: Record) -> str:
        self.number, number = 0, self.number
        try:
            return honest(self, record)
        finally:
            self.number = number

    patch.setattr(Store, "write", write)


def no_claim(patch: pytest.MonkeyPatch) -> None:
    def claim(self: Store, coordinator: str) -> Claim:
        number = 1 if self.record is None else self.record.term.number + 1
        return Claim(term=Term(number, coordinator), record=self.record, fresh=self.fresh and self.record is None)

    patch.setattr(Store, "claim", claim)


def send_before_the_record(patch: pytest.MonkeyPatch) -> None:
    """And die in between, when recovering."""
    honest = Server._carry_out

    def carry_out(self: Server, effects: list) -> None:  # type: ignore[type-arg]
        recovers = any(getattr(getattr(e, "event", None), "kind", "") == "coordinator.recovered" for e in effects)
        honest(self, [e for e in effects if not (recovers and isinstance(e, Persist))])

    patch.setattr(Server, "_carry_out", carry_out)


def no_promise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "promised", property(lambda self: NO_TERM, lambda self, term: None), raising=False)


def same_terms(patch: pytest.MonkeyPatch) -> None:
    honest = Store.claim
    patch.setattr(Store, "claim", lambda self, coordinator: honest(self, "same"))


def deal_again_at_retries(patch: pytest.MonkeyPatch) -> None:
    honest = commit.enter_epoch

    def enter(job: Job, epoch: EpochInfo, *rest: object, **options: object) -> None:
        job.deal = sampler.again(job.deal, epoch.names())
        honest(job, epoch, *rest, **options)  # type: ignore[arg-type]

    patch.setattr(commit, "enter_epoch", enter)


def deal_again_at_recovery(patch: pytest.MonkeyPatch) -> None:
    honest = settle.decide

    def decide(*args: object, **options: object) -> object:
        settled = honest(*args, **options)  # type: ignore[arg-type]
        if isinstance(settled, recovery.Settled) and not settled.commit:
            settled = replace(settled, deal=sampler.again(settled.deal, settled.members))
        return settled

    patch.setattr(settle, "decide", decide)


def lost_batches_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    honest = sampler.following
    patch.setattr(sampler, "following", lambda deal, done, names: honest(deal, tuple(deal.batches), names))


def no_exit_when_refused(patch: pytest.MonkeyPatch) -> None:
    honest = Coordinator.handle
    patch.setattr(
        Coordinator,
        "handle",
        lambda self, event, now: [] if isinstance(event, OutdatedSeen) else honest(self, event, now),
    )


def an_old_record_counts(patch: pytest.MonkeyPatch) -> None:
    def decide(basis: Basis | None, standings: dict[str, Standing], *, waited: bool, force: bool = False) -> object:
        if basis is None:
            return recovery._without_record(standings, force)
        return recovery._with_record(basis, standings, waited, force)

    patch.setattr(settle, "decide", decide)


def no_waiting_for_all(patch: pytest.MonkeyPatch) -> None:
    honest = settle.begin

    def begin(job: Job, fresh: bool, now: float) -> None:
        honest(job, fresh, now)
        job.waited = True

    patch.setattr(settle, "begin", begin)


def forget_who_was_dealt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit, "Basis", lambda epoch, step, deal, last, may_retry: Basis(epoch, step, deal, last))


def the_first_done_commits(patch: pytest.MonkeyPatch) -> None:
    honest = Coordinator._done

    def done(self: Coordinator, replica: object, message: Done) -> None:
        honest(self, replica, message)  # type: ignore[arg-type]
        if self.job.done:
            self.job.done = dict.fromkeys(self.job.members, message)

    patch.setattr(Coordinator, "_done", done)


def numbers_are_used_again(patch: pytest.MonkeyPatch) -> None:
    honest = joins.cancel_preparation

    def cancel(job: Job, why: str) -> None:
        if job.preparation is not None:
            job.next_epoch -= 1
        honest(job, why)

    patch.setattr(joins, "cancel_preparation", cancel)
    patch.setattr(commit, "cancel_preparation", cancel)


def any_done_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "_has_result_of", lambda standing, epoch: standing.holds_result)


CASES: dict[str, tuple[Callable[[], None], Patch]] = {
    "REC: the record is used at a restart": (a_restart_with_one_member_dead, no_record),
    "lost record: all members are needed": (c_committed_alone_and_the_record_is_lost, any_subset_settles),
    "only recorded members settle": (c_committed_alone, anybody_settles),
    "START: the record names its first step": (a_drain_and_a_crash, no_first_step),
    "FENCE: the store refuses lower terms": (a_second_coordinator_while_the_first_lives, no_fence),
    "CLAIM: the term is on disk first": (a_second_coordinator_while_the_first_lives, no_claim),
    "the record is written before anything is sent": (a_recovery_that_commits_and_dies, send_before_the_record),
    "PROMISE: members follow the highest term": (everybody_leaves_a_paused_coordinator, no_promise),
    "UNIQ: terms are unique over all stores": (two_stores, same_terms),
    "ASSIGN: retries keep the dealt set": (a_step_that_is_reduced_again, deal_again_at_retries),
    "ASSIGN: a recovery keeps the dealt set": (a_recovery_in_the_middle_of_a_step, deal_again_at_recovery),
    "lost batches are dealt again": (a_step_that_is_reduced_again, lost_batches_are_forgotten),
    "EXITREF: a refused coordinator exits": (a_store_that_begins_anew_with_low_terms, no_exit_when_refused),
    "STALE: an old record counts as lost": (an_old_copy_of_the_record, an_old_record_counts),
    "WAITALL: a restart waits for all members": (a_restart_that_loses_nobody, no_waiting_for_all),
    "KNOW: who was dealt may retry": (the_first_one_lost_comes_back_alone, forget_who_was_dealt),
    "all members are done before a commit": (one_is_slower_than_the_others, the_first_done_commits),
    "epoch numbers are never used twice": (a_join_that_is_cancelled, numbers_are_used_again),
    "LASTEP: a result counts for the epoch that committed": (a_done_of_another_epoch, any_done_counts),
}


@pytest.mark.parametrize("rule", CASES)
def test_the_history_ends_well_with_the_rule(rule: str) -> None:
    CASES[rule][0]()


@pytest.mark.parametrize("rule", CASES)
def test_the_history_is_caught_without_the_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    history, break_rule = CASES[rule]
    break_rule(monkeypatch)
    with pytest.raises(AssertionError):
        history()
