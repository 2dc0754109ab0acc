"""Several rails carry the data at once: who takes what, and what it is worth."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from ftar_core.native import core

from .cluster import LOOPBACK, Cluster, random_array, ring_sum
from .net import NAMESPACES, Net, Ranks, eventually

KIB, MIB = 1 << 10, 1 << 20
STRIPE = {"mode": "stripe", "hold_down_ms": 20, "hold_down_max_ms": 20, "probe_interval_ms": 10}
THREE = [*LOOPBACK, ("rail2", "", "127.0.0.3")]


# --- the decision ----------------------------------------------------------------------------------------------------


def play(rates: list[float], messages: list[int], overhead_ms: float = 0.0) -> tuple[float, list[int]]:
    """Rails of constant rates pull until all is sent, in steps of 0.1 ms: (when the last byte is through, bytes by
    rail). A rail is asked while less than 128 KiB wait at it."""
    left = list(messages)
    backlog = [0.0] * len(rates)
    moved = [0] * len(rates)
    now = 0.0
    while left or any(b > 0 for b in backlog):
        for rail in range(len(rates)):
            while left and backlog[rail] < 128 * KIB:
                loads = [(r, int(b)) for r, b in zip(rates, backlog, strict=True)]
                take = core.stripe_share(loads, rail, sum(left), left[0])
                if take == 0:
                    break
                take = min(take, left[0])
                assert take == left[0] or take >= 64 * KIB, "small messages are not cut"
                assert take <= MIB
                backlog[rail] += take
                moved[rail] += take
                left[0] -= take
                if left[0] == 0:
                    left.pop(0)
        assert not left or any(b > 0 for b in backlog), "all declined"
        now += 0.1
        backlog = [max(0.0, b - rate * 0.1) for b, rate in zip(backlog, rates, strict=True)]
    return now, moved


@pytest.mark.parametrize(
    "rates", [[125_000.0], [125_000.0, 125_000.0], [125_000.0, 31_250.0], [12_500.0, 125_000.0, 125_000.0], [1e6, 1e5]]
)
@pytest.mark.parametrize("messages", [[64 * MIB], [MIB] * 64, [300_000] * 100])
def test_rails_carry_in_proportion_and_no_slow_one_holds_up_the_end(rates: list[float], messages: list[int]) -> None:
    took, moved = play(rates, messages)
    ideal = sum(messages) / sum(rates)
    assert took <= ideal * 1.05 + 2
    for rate, bytes_ in zip(rates, moved, strict=True):
        assert bytes_ == pytest.approx(sum(messages) * rate / sum(rates), rel=0.15, abs=2 * MIB)


def test_a_single_small_message_goes_where_it_is_through_first() -> None:
    for size in (0, 1, 4096, 64 * KIB):
        for fast in (0, 1):
            loads = [(100_000.0, 0), (100_000.0, 0)]
            loads[1 - fast] = (10_000.0, 0)
            assert core.stripe_share(loads, fast, size, size) == max(size, 1)
            assert core.stripe_share(loads, 1 - fast, size, size) == 0
    busy = [(100_000.0, 50 * MIB), (10_000.0, 0)]
    assert core.stripe_share(busy, 1, 64 * KIB, 64 * KIB) == 64 * KIB, "the fast one has half a second to go"


def test_the_rail_that_would_be_through_first_never_declines() -> None:
    dice = random.Random(1)
    for _ in range(5_000):
        n = dice.randrange(1, 5)
        loads = [
            (dice.choice([0.0, 1.0, dice.uniform(1, 1e6)]), dice.choice([0, dice.randrange(1 << 30)])) for _ in range(n)
        ]
        piece = dice.choice([0, 1, dice.randrange(1 << 27)])
        queued = piece + dice.choice([0, dice.randrange(1 << 30)])
        takes = [core.stripe_share(loads, rail, queued, piece) for rail in range(n)]
        assert any(takes), (loads, queued, piece)
        known = [r for r, _ in loads if r > 0]
        rates = [r if r > 0 else (sum(known) / len(known) if known else 1.0) for r, _ in loads]
        through = [(b + max(queued, piece, 1)) / r for (_, b), r in zip(loads, rates, strict=True)]
        assert takes[through.index(min(through))] > 0


def test_the_rate_follows_the_rail_and_not_its_pauses() -> None:
    meter = core.RateMeter()
    bytes_, busy = 0, 0.0
    for _ in range(100):
        bytes_, busy = bytes_ + 125_000 * 10, busy + 10  # a pause costs no busy time
        meter.sample(bytes_, busy)
    assert meter.rate() == pytest.approx(125_000, rel=0.01)
    for _ in range(30):
        bytes_, busy = bytes_ + 12_500 * 10, busy + 10
        meter.sample(bytes_, busy)
    assert meter.rate() == pytest.approx(12_500, rel=0.1)
    for _ in range(50):
        meter.doubt()
    assert meter.rate() > 100_000, "a rail that is never asked is tried again"
    meter.sample(1_000_000, 10)  # another connection begins anew
    assert meter.rate() > 12_500


# --- the links -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rails", [2, 3])
def test_all_rails_carry_and_every_bit_is_right(rails: int) -> None:
    rng = np.random.default_rng(rails)
    with Cluster(3, rails=THREE[:rails], **STRIPE) as cluster:
        epoch = cluster.start()
        for step, size in enumerate([0, 1, 3_000, 100_000, 4_000_001, 4_000_001]):
            sources = [random_array(rng, size, "float32") for _ in range(3)]
            results = cluster.all_reduce(epoch, step, 0, sources, "float32")
            assert {r.tobytes() for r in results} == {ring_sum(sources, "float32").tobytes()}
        links = [li for i in range(3) for li in cluster.links(i)]
        assert all(li["active"] for li in links)
        assert all(li["flaps"] == 0 and li["resumes"] == 0 for li in links)


def test_members_with_different_modes_understand_each_other() -> None:
    rng = np.random.default_rng(5)
    with Cluster(2, **STRIPE) as striping, Cluster(2) as backing:
        engines = [striping.engines[0], backing.engines[1]]
        epoch = bytes(16)
        members = [striping.member(0), backing.member(1)]
        for me, engine in enumerate(engines):
            engine.prepare(epoch, members, me)
            engine.activate(epoch)
        sources = [random_array(rng, 2_000_000, "float32") for _ in range(2)]
        results = [np.zeros_like(s) for s in sources]
        for cluster, me in ((striping, 0), (backing, 1)):
            cluster.submit(me, epoch, 1, 0, sources[me], results[me], "float32")
        for cluster, me in ((striping, 0), (backing, 1)):
            cluster.reduced(me, epoch, 1, 0)
        assert {r.tobytes() for r in results} == {ring_sum(sources, "float32").tobytes()}
        carrying = {li["rail"] for li in engines[0].links() if li["direction"] == "out" and li["active"]}
        assert carrying == {"rail0", "rail1"}
        assert [li["active"] for li in engines[1].links() if li["direction"] == "out"] == [True, False]


@pytest.mark.parametrize("mode", ["", "strip", "Stripe"])
def test_an_unknown_mode_is_named(mode: str) -> None:
    with pytest.raises(ValueError, match="must be backup or stripe"):
        Cluster(1, mode=mode)


# --- in namespaces ---------------------------------------------------------------------------------------------------


@pytest.fixture
def net() -> Iterator[Net]:
    with Net(nodes=2) as made:
        yield made


def sent(ranks: Ranks) -> dict[str, int]:
    return {li["rail"]: li["bytes"] for li in ranks.workers[0].ask("links") if li["direction"] == "out"}


class TestNamespaces:
    pytestmark = NAMESPACES

    def test_a_rail_goes_and_comes_back_and_the_other_goes_on(self, net: Net) -> None:
        with Ranks(net, 2, count=400_000, **STRIPE) as ranks:
            ranks.advance(5)
            assert ranks.active() == {"rail0", "rail1"}
            for rail in (0, 1, 0):
                net.link(0, rail, "down")
                ranks.advance(5)
                assert ranks.active() == {f"rail{1 - rail}"}
                net.link(0, rail, "up")
                eventually(lambda: ranks.active() == {"rail0", "rail1"}, "both carry again", 20, ranks.workers)
                ranks.advance(5)
            ranks.finish()

    def test_equal_rails_carry_equal_shares(self, net: Net) -> None:
        for node in (0, 1):
            for rail in (0, 1):
                net.limit(node, rail, 200)
        with Ranks(net, 2, count=1_000_000, **STRIPE) as ranks:
            ranks.advance(12)
            shares = sent(ranks)
            assert 0.35 < shares["rail0"] / sum(shares.values()) < 0.65, shares
            ranks.finish()

    def test_a_rail_of_a_tenth_of_the_rate_gets_about_a_tenth(self, net: Net) -> None:
        for node in (0, 1):
            net.limit(node, 0, 400)
            net.limit(node, 1, 40)
        with Ranks(net, 2, count=1_000_000, **STRIPE) as ranks:
            ranks.advance(5)
            before = sent(ranks)
            ranks.advance(12)
            after = sent(ranks)
            slow, fast = (after[rail] - before[rail] for rail in ("rail1", "rail0"))
            assert 0 < slow < fast * 0.3, (slow, fast)
            ranks.finish()

    def test_frames_vanish_on_one_of_three_rails(self) -> None:
        with Net(nodes=2, rails=3) as net, Ranks(net, 2, count=400_000, **STRIPE) as ranks:
            ranks.advance(5)
            net.lose_silently(0, 1, to=1)
            ranks.advance(10)
            eventually(lambda: ranks.active() == {"rail0", "rail2"}, "two carry", 20, ranks.workers)
            net.lose_no_more(0, 1, to=1)
            eventually(lambda: len(ranks.active()) == 3, "three carry", 20, ranks.workers)
            ranks.finish()
