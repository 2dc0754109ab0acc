"""Batch numbers to samples: each sample once an epoch, whoever deals."""

from collections import Counter

import pytest

from ftar_core.training.sampling import batch_indices, dataset_length, permuted


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 100, 1000, 4097])
def test_an_epoch_is_a_permutation(count: int) -> None:
    assert sorted(permuted(index, count, 7, 3) for index in range(count)) == list(range(count))


def test_epochs_and_seeds_differ_and_repeat_themselves() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [permuted(index, 200, seed, epoch) for index in range(200)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1) != order(2, 0)
    # About one fixed point is expected in a random permutation, far fewer than ten.
    assert sum(i == p for i, p in enumerate(order(1, 0))) < 10


def test_batches_cover_each_epoch_exactly_once_across_epoch_ends() -> None:
    count, size = 10, 4  # 5 batches are 2 epochs
    seen = Counter(index for batch in range(5) for index in batch_indices(batch, size, count, seed=3))
    assert seen == dict.fromkeys(range(count), 2)
    assert all(len(batch_indices(batch, size, count, 3)) == size for batch in range(7))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        batch_indices(0, 0, 10, 0)
    with pytest.raises(ValueError, match="empty"):
        dataset_length([])
    assert dataset_length("abc") == dataset_length(3) == 3
