"""From a batch number to sample indices: a pure function, the same on every machine, with no memory.

The coordinator deals batch *numbers* (protocol/sampler.py) and never sees data. Here number b stands for samples [b *
size, (b + 1) * size) of an endless sequence: the data set in a new random order, again and again. A batch that went
back because its contributor was lost is therefore the same samples wherever it is dealt next, and a replica that
starts again at step 100,000 needs no history.

The random order is a keyed permutation of 0..n-1, computed for one index at a time: a balanced Feistel network over the
next power of four, walked until it lands inside n (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002; at
most four walks on average). Rejected: `torch.randperm`, which costs 8 bytes a sample and each epoch a pause, and whose
order is not promised to be the same in the next version.
"""

from __future__ import annotations

from collections.abc import Sized

_MASK = (1 << 64) - 1
_ROUNDS = 6


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit changes about half of the output bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permuted(index: int, count: int, seed: int, epoch: int) -> int:
    """Where `index` of 0..count-1 goes in the order of this (seed, epoch). A bijection for each (count, seed,
    epoch)."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    key = _mix(_mix(seed & _MASK) ^ epoch)
    while True:
        left, right = index >> half, index & low
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mix(key ^ (number << 56) ^ right) & low)
        index = (left << half) | right
        if index < count:
            return index


def batch_indices(batch: int, batch_size: int, count: int, seed: int) -> list[int]:
    """Sample indices (each 0..count-1) of global batch number `batch` >= 0. Every epoch uses every sample once; a
    batch may reach from one epoch into the next, so that all batches have the same size. Raises ValueError for sizes
    below 1."""
    if count < 1 or batch_size < 1 or batch < 0:
        raise ValueError(f"batch {batch} of {batch_size} samples from {count}: sizes must be at least 1")
    first = batch * batch_size
    return [permuted(position % count, count, seed, position // count) for position in range(first, first + batch_size)]


def dataset_length(dataset: Sized | int) -> int:
    """`dataset` or its length, checked. Raises ValueError when there is nothing to train on."""
    count = dataset if isinstance(dataset, int) else len(dataset)
    if count < 1:
        raise ValueError("the data set is empty")
    return count
