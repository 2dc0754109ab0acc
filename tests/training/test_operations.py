"""Plain operations while members are lost at any moment: real rings over loopback, the control loops' part played here.

The checker knows only the promise: of the members that are there at the end, all have returned the same bits from each
operation, and none waits for ever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn

from ftar_core.errors import FtarError
from ftar_core.native import core
from ftar_core.protocol.effects import EnterEpoch, FollowSources
from ftar_core.training.exchange import Exchange
from ftar_core.training.operations import Kind, Operation
from ftar_core.training.plain import operate
from ftar_core.training.plan import make_plan
from ftar_core.training.state import raw_bytes
from ftar_core.wire.ids import EpochId, Term
from ftar_core.wire.messages import Deal, Endpoint, EpochInfo, MemberInfo, RankInfo

PLAN = make_plan(nn.Linear(8, 8), bucket_bytes=64)
DEADLINE_S = 90.0


class Node:
    """One member: an engine, an exchange, a thread that hands on the engine's events, one that trains."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        options = core.Options()
        options.heartbeat_misses, options.unreachable_ms = 60, 5000
        self.engine = core.Engine("t", b"0123456789abcdef", name, 1, [("a", "", "127.0.0.1")], options)
        self.retained = [torch.full((b.count,), float(number + 1), dtype=b.dtype) for b in PLAN.all_buckets]
        self.reduced = [torch.zeros_like(bucket) for bucket in self.retained]
        self.exchange = Exchange(
            job="t", replica=name, plan=PLAN, ring=self.engine, retained=self.retained, reduced=self.reduced
        )
        links = tuple(Endpoint(rail=r, addr=a, port=p) for r, a, p in self.engine.endpoints())
        self.info = MemberInfo(
            replica=name, incarnation=1, slot=number, ranks=(RankInfo(rank=0, node="n", links=links, state=()),)
        )
        self.results: list[str] = []
        self.error: BaseException | None = None
        self.alive = True
        self._threads = [threading.Thread(target=self._events, daemon=True)]
        self._threads[0].start()

    def _events(self) -> None:
        while self.alive:
            for event in self.engine.events():
                if event["type"] == "reduced":
                    self.exchange.reduced(event["epoch"], event["step"], event["bucket"])
            time.sleep(0.001)

    def train(self, program: Callable[[Node], None]) -> None:
        def work() -> None:
            try:
                self.exchange.operations.begin(1)
                program(self)
            except BaseException as error:
                self.error = error

        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def run(self, operation: Operation) -> torch.Tensor | None:
        result = self.exchange.operations.run(operation)
        if result is not None:
            self.results.append(bytes(raw_bytes(result)).hex())
        return result

    def finished(self) -> bool:
        return not self._threads[-1].is_alive()

    def kill(self) -> None:
        self.alive = False
        self.exchange.end(75, "killed")
        self.engine.close()
        for thread in self._threads:
            thread.join(DEADLINE_S)


class Ring:
    def __init__(self, count: int) -> None:
        self.nodes = [Node(f"r{number}", number) for number in range(count)]
        self._epoch = 0
        self.deal = Deal(batches={node.name: node.number for node in self.nodes}, cursor=count)

    def enter(self, nodes: list[Node], *, retry: bool = True, pause: Callable[[], float] = lambda: 0.0) -> None:
        self._epoch += 1
        epoch = EpochInfo(id=EpochId(Term(1, "c"), self._epoch), members=tuple(node.info for node in nodes))
        for node in nodes:  # news does not reach all at once
            time.sleep(pause())
            node.exchange.enter_epoch(EnterEpoch(epoch, 1, self.deal, retry, EpochId(Term(1, "c"), 0)))

    def close(self) -> None:
        for node in self.nodes:
            if node.alive:
                node.kill()


@pytest.fixture
def rings() -> object:
    made: list[Ring] = []

    def make(count: int) -> Ring:
        made.append(Ring(count))
        return made[-1]

    yield make
    for ring in made:
        ring.close()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def program(node: Node) -> None:
    """As a training loop: operations, gradients of backward, more operations."""
    own = torch.arange(5, dtype=torch.float32) * (node.number + 1) / 3
    assert operate([own, own.to(torch.bfloat16)], Kind.MEAN, node.run)
    assert operate([own], Kind.BROADCAST, node.run)
    for bucket in range(len(PLAN.all_buckets) - 1):
        node.exchange.produced(bucket)
    assert operate([torch.full((40_000,), node.number, dtype=torch.int64)], Kind.SUM, node.run)
    assert node.run(Operation(Kind.BARRIER, torch.empty(0))) is not None
    node.exchange.produced(len(PLAN.all_buckets) - 1)


def test_without_a_loss_the_results_are_what_they_say(rings: Callable[[int], Ring]) -> None:
    ring = rings(3)
    seen: dict[str, list[torch.Tensor]] = {}

    def work(node: Node) -> None:
        own = torch.tensor([1.0, -0.0]) * (node.number + 1)
        mean = operate([own, torch.tensor([node.number])][:1], Kind.MEAN, node.run)
        total = operate([own, torch.tensor([node.number])], Kind.SUM, node.run)
        whose = operate([torch.tensor([-0.0, float("nan"), node.number])], Kind.BROADCAST, node.run, "r2")
        empty = operate([torch.empty(0, 3)], Kind.SUM, node.run)
        assert mean
        assert total
        assert whose
        assert empty
        seen[node.name] = [*mean, *total, *whose, *empty]

    ring.enter(ring.nodes, retry=False)
    for node in ring.nodes:
        node.train(work)
    until(lambda: all(node.finished() for node in ring.nodes), "all return")
    assert [node.error for node in ring.nodes] == [None] * 3
    mean, total, numbers, whose, empty = seen["r0"]
    assert mean.tolist() == [2.0, 0.0]
    assert total.tolist() == [6.0, 0.0]
    assert numbers.tolist() == [3]
    assert str(whose.tolist()) == "[-0.0, nan, 2.0]"
    assert empty.shape == (0, 3)
    assert len({tuple(node.results) for node in ring.nodes}) == 1


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_lost_the_others_return_the_same(rings: Callable[[int], Ring], seed: int) -> None:
    chance = random.Random(seed)
    ring = rings(4)
    pause = lambda: chance.choice([0.0, 0.0, 0.001, 0.01])  # noqa: E731
    ring.enter(ring.nodes, retry=False, pause=pause)
    for node in ring.nodes:
        time.sleep(chance.choice([0.0, 0.002, 0.01]))
        node.train(program)
    living = list(ring.nodes)
    for _ in range(chance.randint(1, 3)):
        time.sleep(chance.choice([0.0, 0.001, 0.003, 0.01, 0.03]))
        if len(living) > 1 and chance.random() < 0.8:
            lost = living.pop(chance.randrange(len(living)))
            lost.kill()
        ring.enter(living, pause=pause)
    until(lambda: all(node.finished() for node in living), f"seed {seed}: {[n.results for n in living]}")
    assert [node.error for node in living] == [None] * len(living)
    assert len(living[0].results) == 5
    assert len({tuple(node.results) for node in living}) == 1
    until(lambda: all(node.exchange.reduced_epoch() is not None for node in living), f"seed {seed}: gradients")
    expected = float(sum(node.number + 1 for node in living))
    for node in living:
        assert all((bucket == expected).all() for bucket in node.reduced), "gradients are those of the living"


def test_who_has_the_result_keeps_it_when_its_giver_is_gone(rings: Callable[[int], Ring]) -> None:
    """r0 returned with r2's share in it, r1 had not: r1 gets r0's result, not a sum of its own."""
    ring = rings(3)
    r0, r1, r2 = ring.nodes
    ring.enter([r0, r2], retry=False)
    share = lambda node: operate([torch.tensor([float(node.number)])], Kind.SUM, node.run)  # noqa: E731
    for node in (r0, r2):
        node.train(lambda node: share(node) and None)
    until(lambda: r0.finished() and r2.finished(), "both return")
    r2.kill()
    ring.enter([r0, r1])
    r1.train(lambda node: share(node) and None)
    until(r1.finished, "r1 returns")
    assert r1.error is None
    assert r0.results == r1.results == [bytes(raw_bytes(torch.tensor([2.0]))).hex()]


def test_a_member_without_a_batch_adds_nothing_and_does_not_count(rings: Callable[[int], Ring]) -> None:
    ring = rings(3)
    ring.deal = Deal(batches={"r0": 0, "r1": 1}, cursor=2)
    seen: list[list[float]] = []

    def work(node: Node) -> None:
        mean = operate([torch.tensor([4.0 * (node.number + 1)])], Kind.MEAN, node.run)
        assert mean
        seen.append(mean[0].tolist())

    ring.enter(ring.nodes, retry=False)
    for node in ring.nodes:
        node.train(work)
    until(lambda: all(node.finished() for node in ring.nodes), "all return")
    assert seen == [[6.0]] * 3


def test_a_difference_between_replicas_is_named_not_waited_for(rings: Callable[[int], Ring]) -> None:
    ring = rings(3)
    ring.enter(ring.nodes, retry=False)
    for node in ring.nodes:
        size = 3 if node.number == 1 else 2
        node.train(lambda node, size=size: operate([torch.zeros(size)], Kind.SUM, node.run) and None)
    until(lambda: all(node.finished() for node in ring.nodes), "all return")
    assert all(isinstance(node.error, FtarError) for node in ring.nodes)
    assert "allreduce (sum) of 2 float32" in str(ring.nodes[0].error)
    assert "but r1 something else" in str(ring.nodes[0].error)
    assert "but r0, r2 something else" in str(ring.nodes[1].error)


def test_a_member_that_is_put_out_or_ends_gets_nothing(rings: Callable[[int], Ring]) -> None:
    ring = rings(2)
    ring.enter(ring.nodes, retry=False)
    got: list[object] = []
    for node in ring.nodes:
        until(node.finished, "idle") if got else None
    r0, r1 = ring.nodes
    r0.train(lambda node: got.append(node.run(Operation(Kind.SUM, torch.ones(1)))))
    time.sleep(0.05)
    r0.exchange.follow_sources(FollowSources(()))
    until(r0.finished, "r0 gives up")
    r1.train(lambda node: got.append(node.run(Operation(Kind.SUM, torch.ones(1)))))
    r1.exchange.end(75, "evicted")
    until(r1.finished, "r1 gives up")
    assert got == [None, None]
    with suppress(FtarError):
        operate([torch.zeros(2, dtype=torch.complex64)], Kind.SUM, r0.run)
        pytest.fail("complex numbers are refused")
    with pytest.raises(FtarError, match="would be rounded"):
        operate([torch.zeros(2, dtype=torch.int32)], Kind.MEAN, r0.run)


def test_who_is_ahead_answers_in_the_order_of_the_program(rings: Callable[[int], Ring]) -> None:
    """Operations before and behind gradient buckets: r0 has done all of the step, r1 nothing. What r1 sends of a bucket
    needs a place at r0 before the operation behind it can arrive."""
    ring = rings(3)
    r0, r1, r2 = ring.nodes
    ring.enter([r0, r2], retry=False)
    for node in (r0, r2):
        node.train(program)
    until(lambda: r0.finished() and r2.finished(), "both return")
    r2.kill()
    ring.enter([r0, r1])
    r1.train(program)
    until(r1.finished, "r1 returns")
    assert r1.error is None
    assert r1.results == r0.results
    until(lambda: all(node.exchange.reduced_epoch() is not None for node in (r0, r1)), "the gradients")
    assert all((bucket == 3.0).all() for node in (r0, r1) for bucket in node.reduced)
