"""A replica's side alone: what it believes, what it refuses, what it tells."""

from __future__ import annotations

from ftar_core.protocol.effects import (
    ApplyCommit,
    DiscardRing,
    End,
    EnterEpoch,
    PrepareRing,
    Reconnect,
    SendHello,
    SendOutdated,
    Tell,
    Wait,
)
from ftar_core.protocol.events import (
    Challenged,
    Disconnected,
    LeaveNow,
    Received,
    RingReady,
    ShadowAt,
    StepReduced,
    Tick,
)
from ftar_core.protocol.member import Member
from ftar_core.wire.exits import RankExit
from ftar_core.wire.ids import NO_EPOCH, EpochId, Term
from ftar_core.wire.messages import (
    Catchup,
    CaughtUp,
    Commit,
    Deal,
    Done,
    EpochInfo,
    Evicted,
    Join,
    Leaving,
    MemberInfo,
    NewEpoch,
    Prepare,
    PrepareCancel,
    Prepared,
    Refused,
    Verdict,
    Welcome,
)

T1, T2 = Term(1, "x"), Term(2, "y")
DEAL = Deal(batches={"r0": 0, "r1": 1}, cursor=2)


def epoch(number: int, names: str = "r0 r1", term: Term = T1) -> EpochInfo:
    members = [MemberInfo(replica=n, incarnation=i + 1, slot=i, ranks=()) for i, n in enumerate(names.split())]
    return EpochInfo(id=EpochId(term, number), members=tuple(members))


def joined() -> Member:
    """r0, incarnation 1, at step 1 of epoch 1."""
    member = Member("job", "r0", 0.0, initial_digest="d")
    member.handle(Challenged(T1), 0.0)
    member.handle(Received(Welcome(term=T1, incarnation=1, proof=b"")), 0.0)
    member.handle(Received(Join(term=T1, epoch=epoch(1), step=1, deal=DEAL, last_commit_epoch=NO_EPOCH)), 0.0)
    return member


def reduced(step: int, number: int) -> StepReduced:
    return StepReduced(step, EpochId(T1, number), digest=7, finite=True)


def commit(step: int, number: int, **options: object) -> Received:
    return Received(
        Commit(
            term=options.pop("term", T1),  # type: ignore[arg-type]
            step=step,
            epoch=EpochId(T1, number),
            contributors=("r0", "r1"),
            verdict=Verdict.APPLY,
            deal=DEAL,
            **options,  # type: ignore[arg-type]
        )
    )


def test_a_step_goes_from_reduced_to_done_to_committed() -> None:
    member = joined()
    (tell,) = member.handle(reduced(1, 1), 1.0)
    assert isinstance(tell, Tell)
    assert isinstance(tell.message, Done)
    (apply,) = member.handle(commit(1, 1), 1.1)
    assert isinstance(apply, ApplyCommit)
    assert (member.step, member.last_commit_epoch, member.report().done) == (2, EpochId(T1, 1), False)


def test_results_of_another_epoch_or_step_say_nothing() -> None:
    member = joined()
    assert member.handle(reduced(1, 9), 1.0) == []
    assert member.handle(reduced(2, 1), 1.0) == []
    assert len(member.handle(reduced(1, 1), 1.0)) == 1
    assert member.handle(reduced(1, 1), 1.0) == []


def test_an_older_coordinator_is_refused_and_told_why() -> None:
    member = joined()
    member.handle(Challenged(T2), 1.0)
    effects = member.handle(Challenged(T1), 2.0)
    assert effects[0] == SendOutdated(T2)
    assert isinstance(effects[1], Reconnect)
    assert member.handle(commit(1, 1), 2.0) == [], "and its words count no more"


def test_a_commit_of_what_it_does_not_hold_ends_the_replica() -> None:
    member = joined()
    effects = member.handle(commit(1, 1), 1.0)
    assert isinstance(effects[-1], End)
    assert effects[-1].exit_code == RankExit.RESTART
    assert "told to commit step 1 of epoch 1.1, but is at step 1" in effects[-1].reason


def test_a_repeated_commit_is_nothing_new() -> None:
    member = joined()
    member.handle(reduced(1, 1), 1.0)
    member.handle(commit(1, 1), 1.0)
    assert member.handle(commit(1, 1), 1.0) == []


def test_a_new_epoch_reduces_the_same_step_again_of_the_same_dealing() -> None:
    member = joined()
    member.handle(reduced(1, 1), 1.0)
    news = NewEpoch(term=T1, epoch=epoch(2, "r0"), step=1, deal=DEAL, lost={"r1": "died"}, last_commit_epoch=NO_EPOCH)
    (enter,) = member.handle(Received(news), 1.0)
    assert enter == EnterEpoch(epoch(2, "r0"), 1, DEAL, True, NO_EPOCH)
    assert member.report().done is False
    assert member.handle(Received(news), 1.0) == [], "repeated"
    assert member.handle(reduced(1, 1), 1.0) == [], "the result of the old epoch came late"


def test_the_result_is_told_again_on_a_new_connection() -> None:
    member = joined()
    member.handle(reduced(1, 1), 1.0)
    reconnect, wait = member.handle(Disconnected("reset"), 1.0)
    assert isinstance(reconnect, Reconnect)
    assert isinstance(wait, Wait)
    (hello,) = member.handle(Challenged(T1), 1.1)
    assert isinstance(hello, SendHello)
    assert (hello.incarnation, hello.report.done, hello.report.incarnations) == (1, True, (1, 2))
    (tell,) = member.handle(Received(Welcome(term=T1, incarnation=1, proof=b"")), 1.1)
    assert isinstance(tell, Tell)
    assert isinstance(tell.message, Done)


def test_a_lost_coordinator_is_waited_for_but_not_for_ever() -> None:
    member = joined()
    member.handle(Disconnected("reset"), 10.0)
    assert member.deadline() == 610.0
    assert member.handle(Tick(), 609.0) == []
    (end,) = member.handle(Tick(), 610.0)
    assert end == End(RankExit.RESTART, "no coordinator for 600 s")
    assert member.deadline() is None


def test_a_join_with_a_commit_prepared_before() -> None:
    member = joined()
    (prepare,) = member.handle(Received(Prepare(term=T1, epoch=epoch(2, "r0 r1 r2"))), 1.0)
    assert isinstance(prepare, PrepareRing)
    assert member.handle(RingReady(EpochId(T1, 2)), 1.0) == [Tell(Prepared(epoch=EpochId(T1, 2)))]
    member.handle(reduced(1, 1), 1.0)
    apply, enter = member.handle(commit(1, 1, next=epoch(2, "r0 r1 r2")), 1.0)
    assert isinstance(apply, ApplyCommit)
    assert isinstance(enter, EnterEpoch)
    assert (enter.step, enter.retry) == (2, False)


def test_a_cancelled_preparation_is_dropped() -> None:
    member = joined()
    member.handle(Received(Prepare(term=T1, epoch=epoch(2, "r0 r1 r2"))), 1.0)
    assert member.handle(Received(PrepareCancel(term=T1, epoch=EpochId(T1, 2))), 1.0) == [DiscardRing(EpochId(T1, 2))]
    assert member.handle(RingReady(EpochId(T1, 2)), 1.0) == []


def test_the_last_commit_and_the_drain_end_it_each_with_its_code() -> None:
    for options, code in (({"last": True}, RankExit.FINISHED), ({"drained": ("r0",)}, RankExit.DRAINED)):
        member = joined()
        member.handle(reduced(1, 1), 1.0)
        effects = member.handle(commit(1, 1, **options), 1.0)
        assert isinstance(effects[0], ApplyCommit), "the step counts first"
        assert isinstance(effects[-1], End)
        assert effects[-1].exit_code == code
        assert member.handle(commit(2, 1), 2.0) == []


def test_what_the_coordinator_may_say_to_end_a_member() -> None:
    for message, code in (
        (Evicted(term=T1, reason="silent", rejoin=True), RankExit.RESTART),
        (Evicted(term=T1, reason="taken out", rejoin=False), RankExit.DRAINED),
        (Refused(reason="another model", retry=False, hint="same script"), RankExit.REFUSED),
    ):
        (end,) = joined().handle(Received(message), 1.0)
        assert isinstance(end, End)
        assert end.exit_code == code


def test_a_shadow_reports_only_what_it_really_holds() -> None:
    member = Member("job", "r2", 0.0, initial_digest="d")
    assert member.report().step == 1
    member.handle(Received(Catchup(term=T1, sources=epoch(1).members)), 0.0)
    assert member.report().step == 0
    (tell,) = member.handle(ShadowAt(4, EpochId(T1, 1), ready=True), 1.0)
    assert tell == Tell(CaughtUp(step=4))
    assert (member.report().step, member.report().epoch) == (5, NO_EPOCH)
    member.handle(Received(Welcome(term=T1, incarnation=3, proof=b"")), 1.0)
    join = Join(term=T1, epoch=epoch(2, "r0 r1 r2"), step=7, deal=DEAL, last_commit_epoch=EpochId(T1, 1))
    (enter,) = member.handle(Received(join), 1.0)
    assert isinstance(enter, EnterEpoch)
    assert member.report().step == 0, "told to join at 7, but it holds the state after 4"
    told = member.handle(ShadowAt(6, EpochId(T1, 1), ready=True), 1.0)
    assert told == [Tell(CaughtUp(step=6))]
    assert member.report().step == 7


def test_a_session_that_cannot_go_on_says_so_first() -> None:
    tell, end = joined().handle(LeaveNow("exception in the update: boom", 1), 1.0)
    assert tell == Tell(Leaving(reason="exception in the update: boom"))
    assert end == End(1, "exception in the update: boom")
