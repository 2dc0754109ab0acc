"""What is true after a restart: the decision alone, one sentence of the design a test."""

from __future__ import annotations

from ftar_core.protocol.recovery import Basis, Settled, Standing, Undecided, decide
from ftar_core.wire.ids import NO_EPOCH, EpochId, Term
from ftar_core.wire.messages import Deal, Done, EpochInfo, MemberInfo, Report

T1 = Term(1, "x")
E1, E2 = EpochId(T1, 1), EpochId(T1, 2)
DEAL = Deal(batches={"a": 6, "b": 7, "c": 8}, cursor=9)
LIVES = {"a": 1, "b": 2, "c": 3}


def epoch(id: EpochId, names: str) -> EpochInfo:
    members = [MemberInfo(replica=n, incarnation=LIVES[n], slot=s, ranks=()) for s, n in enumerate(names)]
    return EpochInfo(id=id, members=tuple(members))


def basis(names: str = "abc", id: EpochId = E1, start: int = 3, previous: EpochId = NO_EPOCH) -> Basis:
    return Basis(epoch(id, names), start, DEAL, previous)


def at(
    name: str, step: int, *, of: EpochId = E1, names: str = "abc", done: bool = False, last: EpochId = NO_EPOCH,
    said: bool = True,
) -> Standing:  # fmt: skip
    report = Report(
        step=step, epoch=of, members=tuple(names), incarnations=tuple(LIVES[n] for n in names), done=done,
        last_commit_epoch=last, deal=DEAL,
    )  # fmt: skip
    word = Done(step=step, epoch=of, digest=1, finite=True) if done and said else None
    return Standing(LIVES[name], report, word)


def settled(decision: Settled | Undecided) -> Settled:
    assert isinstance(decision, Settled), decision
    return decision


def undecided(decision: Settled | Undecided) -> Undecided:
    assert isinstance(decision, Undecided), decision
    return decision


def test_it_waits_for_all_recorded_members_until_the_deadline() -> None:
    here = {"a": at("a", 3), "b": at("b", 3)}
    assert "waiting for c of epoch 1.1" in undecided(decide(basis(), here, waited=False)).reason
    assert settled(decide(basis(), here, waited=True)).members == ("a", "b")


def test_all_done_at_the_step_commits_it() -> None:
    here = {n: at(n, 5, done=True) for n in "abc"}
    decision = settled(decide(basis(), here, waited=False))
    assert (decision.commit, decision.step, decision.behind) == (True, 5, ())


def test_an_announced_result_is_waited_for_because_it_carries_the_verdict() -> None:
    here = {n: at(n, 5, done=True, said=n != "b") for n in "abc"}
    assert "b announced" in undecided(decide(basis(), here, waited=True)).reason


def test_one_who_is_not_done_makes_it_a_retry() -> None:
    here = {"a": at("a", 5, done=True), "b": at("b", 5), "c": at("c", 5, done=True)}
    decision = settled(decide(basis(), here, waited=False))
    assert (decision.commit, decision.step, decision.members) == (False, 5, ("a", "b", "c"))


def test_those_behind_commit_the_step_before_first() -> None:
    here = {"a": at("a", 6), "b": at("b", 5, done=True), "c": at("c", 5, done=True)}
    decision = settled(decide(basis(), here, waited=False))
    assert (decision.commit, decision.step, decision.behind, decision.last_commit_epoch) == (False, 6, ("b", "c"), E1)


def test_the_first_step_of_the_record_counts_even_if_nobody_reached_it() -> None:
    """The record of a drain was written, its commit reached nobody who is left: they are done in the epoch before."""
    here = {n: at(n, 5, done=True) for n in "ab"}
    decision = settled(decide(basis("ab", E2, start=6, previous=E1), here, waited=False))
    assert (decision.step, decision.behind, decision.commit) == (6, ("a", "b"), False)


def test_a_member_done_in_another_epoch_than_the_committing_one_fetches_state() -> None:
    here = {"a": at("a", 6, of=E2, names="ab"), "b": at("b", 5, of=NO_EPOCH, done=True)}
    decision = settled(decide(basis("ab", E2, start=6, previous=E1), here, waited=False))
    assert decision.members == ("a",)


def test_others_than_the_recorded_do_not_settle() -> None:
    here = {"a": at("a", 5, done=True), "b": at("b", 5, done=True)}
    decision = undecided(decide(basis("c", E2, start=5), here, waited=True))
    assert decision.hopeless
    assert "nobody of epoch 1.2 (c) has come back" in decision.reason


def test_a_new_process_under_a_recorded_name_is_not_the_recorded_member() -> None:
    stranger = Standing(99, Report(step=1, state_digest="x"))
    decision = decide(basis("a"), {"a": stranger}, waited=True)
    assert undecided(decision).hopeless


def test_a_record_older_than_a_reported_epoch_counts_as_lost() -> None:
    here = {"b": at("b", 6, of=E2, names="ab", last=E2), "c": at("c", 5, done=True)}
    decision = undecided(decide(basis(), here, waited=True))
    assert "the record is lost" in decision.reason
    assert "waiting for a" in decision.reason


def test_without_the_record_all_members_of_the_highest_epoch_settle() -> None:
    here = {"a": at("a", 5, last=E1, done=True), "b": at("b", 5, last=E1, done=True)}
    assert "waiting for c" in undecided(decide(None, here, waited=True)).reason
    here["c"] = at("c", 6, last=E1)
    decision = settled(decide(None, here, waited=False))
    assert (decision.step, decision.behind, decision.last_commit_epoch) == (6, ("a", "b"), E1)


def test_force_goes_on_without_the_absent() -> None:
    here = {"a": at("a", 5, last=E1), "b": at("b", 5, last=E1)}
    decision = settled(decide(None, here, waited=True, force=True))
    assert decision.members == ("a", "b")
    assert "without c" in decision.reason


def test_a_joined_member_whose_state_never_arrived_does_not_settle() -> None:
    here = {"a": at("a", 6), "b": at("b", 0), "c": at("c", 6)}
    assert settled(decide(basis(), here, waited=False)).members == ("a", "c")


def test_what_was_dealt_is_told_by_those_who_were_in_an_epoch() -> None:
    """The first word of the job never reached a: what it reports is only from where it would have begun."""
    begin = Report(step=1, deal=Deal(batches={}, cursor=0, limit=9))
    here = {"a": Standing(LIVES["a"], begin), "b": at("b", 1, names="ab")}
    decision = settled(decide(None, here, waited=False))
    assert decision.deal == DEAL
