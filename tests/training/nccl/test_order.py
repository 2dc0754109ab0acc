"""Pure: the order of buckets and the phases of a communicator, decided without a library or a thread."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from ftar_core.training.nccl.choice import patience_s
from ftar_core.training.nccl.life import NEXT, Life, Phase, id_of, id_words
from ftar_core.training.nccl.order import Order


def taken(order: Order) -> list[tuple[int, int]]:
    found = []
    while (following := order.take()) is not None:
        found.append(following)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_whatever_order_backward_takes_the_order_on_the_stream_is_the_same(seed: int) -> None:
    rng, order = random.Random(seed), Order(9)
    for step in (4, 5, 9):
        offered = list(range(9))
        rng.shuffle(offered)
        out: list[tuple[int, int]] = []
        seen: set[int] = set()
        for bucket in offered:
            order.offer(step, bucket)
            seen.add(bucket)
            assert order.ready == (len(out) in seen)
            out += taken(order)
        assert out == [(step, bucket) for bucket in range(9)]


def test_a_bucket_waits_for_those_before_it_and_a_new_step_forgets_what_waits() -> None:
    order = Order(3)
    order.offer(1, 2)
    order.offer(1, 1)
    assert not order.ready
    assert taken(order) == []
    order.offer(1, 0)
    assert taken(order) == [(1, 0), (1, 1), (1, 2)]
    order.offer(2, 1)
    order.offer(3, 0)
    assert taken(order) == [(3, 0)]
    for bucket in (0, 3, -1):
        with pytest.raises(ValueError, match=f"bucket {bucket} of step 3"):
            order.offer(3, bucket)


def test_a_communicator_goes_through_its_phases_and_never_back() -> None:
    def life(members: int = 2) -> Life:
        return Life(b"", members, 0, Order(1), 0.0)

    assert life(1).phase is Phase.ALONE
    for path in ((Phase.JOINING, Phase.OPEN, Phase.FAILED, Phase.OVER), (Phase.OVER,), (Phase.FAILED, Phase.OVER)):
        made = life()
        for at, phase in enumerate(path):
            made.move(phase, float(at))
            assert made.since == at
            assert made.good == (phase is Phase.OPEN)
    with pytest.raises(RuntimeError, match="from over to open"):
        made.move(Phase.OPEN, 0.0)
    assert set(NEXT) == set(Phase)
    assert not NEXT[Phase.OVER], "what is over stays so"


def test_the_sum_of_all_members_words_is_the_id() -> None:
    unique_id = bytes(random.Random(3).randrange(256) for _ in range(128))
    words = [id_words(unique_id), *(torch.zeros(32, dtype=torch.int32) for _ in range(3))]
    total = words[2] + words[0] + words[1] + words[3]
    assert id_of(total) == unique_id


def test_of_members_that_have_all_failed_the_last_leaves_first_and_alone() -> None:
    waits = [patience_s(slot, 4) for slot in range(4)]
    assert waits == sorted(waits, reverse=True)
    assert all(a - b >= 1 for a, b in pairwise(waits))
    assert patience_s(0, 10_000) < 60
