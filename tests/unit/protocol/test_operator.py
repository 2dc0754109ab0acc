"""What operators may ask, and what each refusal tells them."""

from __future__ import annotations

import pytest

from ftar_core.protocol.config import Detection, JobConfig
from ftar_core.protocol.coordinator import Coordinator
from ftar_core.protocol.effects import Close, CoordinatorEffect, Persist, Reply, Send
from ftar_core.protocol.events import (
    BeatSeen,
    ConnectionClosed,
    MemberHello,
    MemberMessage,
    Operator,
    RecordFailed,
    Tick,
)
from ftar_core.protocol.record import Claim
from ftar_core.wire.accounting import Loss
from ftar_core.wire.heartbeat import Phase, TeamBeat
from ftar_core.wire.ids import Term
from ftar_core.wire.messages import (
    Commit,
    Done,
    Evicted,
    Hello,
    NewEpoch,
    OpReply,
    OpRequest,
    RankInfo,
    Refused,
    Report,
)


class Desk:
    """A running job of r0, r1, r2 on connections 0, 1, 2, and an operator."""

    def __init__(
        self, min_replicas: int = 2, count: int = 3, ranks: int = 1, plans: str = "ppp", **settings: object
    ) -> None:
        self.ranks = ranks
        config = JobConfig(job="j", replicas=count, min_replicas=min_replicas, **settings)  # type: ignore[arg-type]
        self.machine = Coordinator(config, Claim(term=Term(1, "x"), record=None, fresh=True), 0.0)
        self.now = 1.0
        for i in range(count):
            self.hello(i, f"r{i}", plan=plans[i % len(plans)])
        self.effects: list[CoordinatorEffect] = []

    def feed(self, event: object) -> list[CoordinatorEffect]:
        self.now += 0.001
        self.effects = self.machine.handle(event, self.now)  # type: ignore[arg-type]
        return self.effects

    def hello(
        self,
        conn: int,
        name: str,
        plan: str = "p",
        incarnation: int = 0,
        ranks: int | None = None,
        software: dict[str, str] | None = None,
    ) -> list[CoordinatorEffect]:
        report = Report(step=1, state_digest="d")
        return self.feed(
            MemberHello(
                conn,
                Hello(
                    job="j",
                    replica=name,
                    incarnation=incarnation,
                    ranks=tuple(RankInfo(rank=n, node="n", links=(), state=()) for n in range(ranks or self.ranks)),
                    plan=plan,
                    report=report,
                    client_nonce=b"",
                    proof=b"",
                    software=software or {"ftctl": "1", "torch": "2.13.0"},
                ),
            )
        )

    def done(self, *conns: int) -> list[CoordinatorEffect]:
        job = self.machine.job
        step, epoch = job.step, job.epoch.id
        for conn in conns:
            self.feed(MemberMessage(conn, Done(step=step, epoch=epoch, digest=1, finite=True)))
        return self.effects

    def ask(self, op: str, replica: str = "", **options: object) -> OpReply:
        request = OpRequest(id=7, op=op, replica=replica, reason="maintenance", **options)  # type: ignore[arg-type]
        self.feed(Operator(99, "ann", request))
        (reply,) = [e for e in self.effects if isinstance(e, Reply)]
        assert (reply.conn, reply.reply.id) == (99, 7)
        return reply.reply

    def state(self, name: str) -> str:
        return self.machine.job.table.replicas[name].state.value

    def sent(self, kind: type) -> dict[int, object]:
        return {e.conn: e.message for e in self.effects if isinstance(e, Send) and isinstance(e.message, kind)}


def test_a_drain_takes_effect_with_the_next_commit() -> None:
    desk = Desk()
    assert desk.ask("drain", "r1").text == "r1 leaves behind the commit of step 1"
    assert desk.state("r1") == "draining"
    desk.done(0, 1, 2)
    commits = desk.sent(Commit)
    assert set(commits) == {0, 1, 2}
    assert all(c.drained == ("r1",) and c.next.names() == ("r0", "r2") for c in commits.values())  # type: ignore[attr-defined]
    order = [type(e).__name__ for e in desk.effects if isinstance(e, Persist | Send)]
    assert order[0] == "Persist", "the record comes before any word of the new epoch"
    assert desk.state("r1") == "drained"
    assert desk.machine.job.record is not None
    assert desk.machine.job.record.cordoned == ("r1",)


@pytest.mark.parametrize(
    ("op", "replica", "code", "said"),
    [
        ("drain", "r9", "unknown", "no replica r9 in job j (known: r0, r1, r2)"),
        ("evict", "", "unknown", "no replica (none named)"),
        ("drain", "r2", "refused", "min-replicas is 2; --force overrides this"),
        ("evict", "r2", "refused", "min-replicas is 2; --force overrides this"),
        ("drain", "r1", "conflict", "r1 is not in the job: unreachable (connection closed: reset)"),
        ("evict", "r1", "conflict", "r1 is not in the job: unreachable"),
        ("rejoin", "r0", "conflict", "r0 is in the job already: contributing"),
        ("force-quorum", "", "conflict", "the coordinator is not recovering: the job is running"),
        ("dance", "", "unknown", "no such request: dance"),
    ],
)
def test_refusals_say_why(op: str, replica: str, code: str, said: str) -> None:
    desk = Desk()
    desk.feed(ConnectionClosed(1, "reset"))
    answer = desk.ask(op, replica)
    assert (answer.code, said in answer.text) == (code, True), answer.text


def test_the_last_contributor_stays_whatever_is_forced() -> None:
    desk = Desk(min_replicas=1)
    desk.feed(ConnectionClosed(1, "reset"))
    desk.feed(ConnectionClosed(2, "reset"))
    for op in ("drain", "evict"):
        answer = desk.ask(op, "r0", force=True)
        assert answer.code == "refused"
        assert "r0 is the last contributor" in answer.text


def test_two_drains_at_once_are_counted_together() -> None:
    desk = Desk(min_replicas=2)
    assert desk.ask("drain", "r0").code == "ok"
    assert desk.ask("drain", "r1").code == "refused"
    assert desk.ask("drain", "r0").code == "conflict"


def test_a_forced_drain_below_min_replicas_holds_the_job_and_says_so() -> None:
    desk = Desk(min_replicas=3)
    assert desk.ask("drain", "r0", force=True).code == "ok"
    desk.done(0, 1, 2)
    desk.feed(Tick())
    view = desk.machine.view(desk.now, 1000.0)
    assert (view.state, view.reason) == ("holding", "2 contributing, 3 needed (min-replicas)")


def test_a_dry_run_says_what_would_happen_and_changes_nothing() -> None:
    desk = Desk()
    for op in ("drain", "evict", "finish"):
        answer = desk.ask(op, "r1", dry_run=True)
        assert answer.code == "ok"
        assert "would" in answer.text
    assert {desk.state(f"r{i}") for i in range(3)} == {"contributing"}
    assert not desk.machine.job.finishing


def test_an_eviction_is_immediate() -> None:
    desk = Desk()
    desk.done(0)
    assert desk.ask("evict", "r1").text == "r1 is out; it may come back by itself"
    (said,) = desk.sent(Evicted).values()
    assert said.rejoin  # type: ignore[attr-defined]
    assert [e.conn for e in desk.effects if isinstance(e, Close)] == [1]
    news = desk.sent(NewEpoch)
    assert {c: (n.step, n.epoch.names()) for c, n in news.items()} == {0: (1, ("r0", "r2")), 2: (1, ("r0", "r2"))}  # type: ignore[attr-defined]
    assert desk.state("r1") == "evicted"


def test_evicted_for_good_it_is_turned_away_until_rejoin() -> None:
    desk = Desk()
    answer = desk.ask("evict", "r1", rejoin=False).text
    assert answer.startswith("r1 is out; it stays out until it is let in again (`ftctl rejoin replica`")
    desk.feed(Tick())
    desk.hello(10, "r1")
    (said,) = desk.sent(Evicted).values()
    assert not said.rejoin  # type: ignore[attr-defined]
    assert "`ftctl rejoin replica r1`" in said.reason  # type: ignore[attr-defined]
    assert desk.ask("rejoin", "r1").code == "ok"
    desk.hello(11, "r1")
    assert desk.state("r1") == "fetching"


def test_a_rejoin_that_cannot_be_written_is_taken_back() -> None:
    desk = Desk()
    desk.ask("evict", "r1", rejoin=False)
    desk.feed(Tick())
    desk.ask("rejoin", "r1")
    desk.feed(RecordFailed("no space left on device"))
    (reply,) = [e.reply for e in desk.effects if isinstance(e, Reply)]
    assert reply.code == "failed"
    assert "no space left on device" in reply.text
    assert "r1" in desk.machine.job.table.cordoned


def test_finish_makes_the_running_step_the_last() -> None:
    desk = Desk()
    assert desk.ask("finish").text == "step 1 is the last"
    desk.done(0, 1, 2)
    assert all(c.last for c in desk.sent(Commit).values())  # type: ignore[attr-defined]
    assert desk.machine.view(desk.now, 0).state == "finished"
    assert desk.ask("drain", "r0").code == "conflict"


def test_another_model_is_refused_with_a_hint() -> None:
    desk = Desk()
    desk.hello(10, "r7", plan="another")
    desk.now += 2.0  # neither side says what its model is like (test_likeness.py)
    desk.feed(Tick())
    (said,) = desk.sent(Refused).values()
    assert not said.retry  # type: ignore[attr-defined]
    assert "same script" in said.hint  # type: ignore[attr-defined]


def test_a_replica_with_another_number_of_ranks_is_refused_with_both_numbers() -> None:
    desk = Desk(ranks=2)
    desk.hello(10, "r7", plan="another", ranks=1)
    (said,) = desk.sent(Refused).values()
    assert not said.retry  # type: ignore[attr-defined]
    assert said.reason == "r7 has 1 rank, the job's replicas have 2 ranks each"  # type: ignore[attr-defined]
    assert said.hint == "start r7 with WORLD_SIZE=2"  # type: ignore[attr-defined]


def test_a_replica_is_as_alive_as_its_quietest_rank() -> None:
    desk = Desk(ranks=2, detection=Detection(max_evictions=0))
    for turn in range(60):
        desk.now += 0.1
        for conn in range(3):
            silent_ms = max(0, turn - 10) * 100 if conn == 1 else 20
            desk.feed(BeatSeen(conn, 1, 1, 0, 0, TeamBeat(1, 1, silent_ms, 0, 2, Phase.FORWARD, 1, 0, 0)))
        desk.feed(Tick())
        if desk.state("r1") != "contributing":
            assert turn > 15
            reason = desk.machine.job.table.replicas["r1"].reason
            assert "rank 1" in reason
        if desk.state("r1") == "evicted":
            break
    assert desk.state("r1") == "evicted"
    assert desk.machine.job.contributors() == ["r0", "r2"]


def test_a_second_process_of_a_living_replica_has_to_wait() -> None:
    desk = Desk()
    desk.hello(10, "r1")
    (said,) = desk.sent(Refused).values()
    assert said.retry  # type: ignore[attr-defined]
    assert "connected already" in said.reason  # type: ignore[attr-defined]
    for _ in range(15):  # not a word from the old one
        desk.now += 0.1
        desk.feed(Tick())
    desk.hello(11, "r1")
    assert desk.state("r1") == "fetching"
    assert desk.machine.job.contributors() == ["r0", "r2"]


def test_automatic_evictions_are_limited_and_say_what_an_operator_can_do() -> None:
    from ftar_core.protocol.detector import auto_evict

    desk = Desk(min_replicas=1)
    replicas = desk.machine.job.table.replicas
    assert auto_evict(desk.machine.job, replicas["r1"], "silent", desk.now, Loss.SILENT)
    desk.feed(Tick())
    assert not auto_evict(desk.machine.job, replicas["r2"], "silent", desk.now, Loss.SILENT)
    assert "limited to 1 in 10 min" in replicas["r2"].reason
    assert "`ftctl evict replica r2`" in replicas["r2"].reason
