"""The digest against a deliberately dumb twin, and what it promises: a flipped bit always changes it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ftar_core.native import core

from .cluster import Array

M32, M64 = 2**32 - 1, 2**64 - 1
ODD32, ODD1, ODD2 = 0x9E3779B1, 0xD1342543DE82EF95, 0x9E6C63D0876A9A47


def finish(h: int) -> int:
    h = ((h ^ (h >> 32)) * ODD2) & M64
    h = ((h ^ (h >> 29)) * ODD1) & M64
    return h ^ (h >> 32)


def slow_digest(data: bytes, seed: int) -> int:
    lanes = [finish((seed + i * ODD1) & M64) & M32 for i in range(64)]
    padded = data + bytes(-len(data) % 256)
    for at in range(0, len(padded), 4):
        lane = at // 4 % 64
        x = ((lanes[lane] ^ int.from_bytes(padded[at : at + 4], "little")) * ODD32) & M32
        lanes[lane] = x ^ (x >> 15)
    h = finish((seed ^ len(data)) & M64)
    for i in range(0, 64, 2):
        x = ((h ^ (lanes[i] | lanes[i + 1] << 32)) * ODD1) & M64
        h = ((x << 29 | x >> 35) + ODD2) & M64
    return finish(h)


def digest(data: Array, seed: int = 7) -> int:
    return core.quick_digest(data.ctypes.data, data.nbytes, seed)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 8, 255, 256, 257, 511, 512, 1000, 5000])
def test_it_is_what_the_dumb_loop_makes(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size + 3, dtype=np.uint8)[3:]  # not aligned, too
    for seed in (0, 1, M64):
        assert digest(data, seed) == slow_digest(data.tobytes(), seed)


def test_any_flipped_bit_changes_it() -> None:
    data = np.zeros(1000, np.uint8)
    calm = digest(data)
    seen = {calm}
    for bit in range(8 * data.size):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(digest(data))
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8 * data.size + 1
    assert digest(data) == calm


def test_two_flipped_bits_and_exchanged_words_change_it() -> None:
    rng = random.Random(3)
    data = np.random.default_rng(3).integers(0, 256, 4096, dtype=np.uint8)
    calm = digest(data)
    for _ in range(20_000):
        one = rng.randrange(8 * 4096)
        two = (one + rng.choice([1, 15, 31, 32, 64, 2048, 2048 * 3, 2049, 2033])) % (8 * 4096)
        for bit in (one, two):
            data[bit // 8] ^= 1 << bit % 8
        assert digest(data) != calm, (one, two)
        for bit in (one, two):
            data[bit // 8] ^= 1 << bit % 8
    words = data.view(np.uint64)
    words[[5, 5 + 32]] = words[[5 + 32, 5]]
    assert digest(data) != calm
    assert digest(data[:-1]) != digest(data[:-2])


@pytest.mark.parametrize("dtype", sorted(core.DTYPES))
@pytest.mark.parametrize("count", [0, 1, 31, 64, 1025])
def test_check_is_the_digest_and_the_look_for_infinity_in_one(dtype: str, count: int) -> None:
    code, width = core.DTYPES[dtype], {"float64": 8, "int64": 8, "float32": 4, "int32": 4}.get(dtype, 2)
    data = np.random.default_rng(count).integers(0, 60, count * width, dtype=np.uint8)
    assert core.check(data.ctypes.data, count, code, 9) == (digest(data, 9), True)
    exponent = {"float64": 0x7FF0 << 48, "float32": 0x7F80 << 16, "bfloat16": 0x7F80, "float16": 0x7C00}.get(dtype)
    for at in (0, count // 2, count - 1):
        if count == 0:
            continue
        kept = data.copy()
        special = exponent if exponent is not None else (1 << 8 * width) - 1
        data[at * width : (at + 1) * width] = list(special.to_bytes(width, "little"))
        assert core.check(data.ctypes.data, count, code, 9) == (digest(data, 9), exponent is None)
        data[(at + 1) * width - 1] |= 0x80  # minus infinity
        assert core.check(data.ctypes.data, count, code, 9)[1] is (exponent is None)
        data[:] = kept


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_the_sum_of_squares_is_numpys(dtype: str) -> None:
    for count in (0, 1, 17, 10_007):
        data = np.random.default_rng(count).standard_normal(count).astype(dtype)
        wanted = float((data.astype(np.float64) ** 2).sum())
        assert core.squares(data.ctypes.data, count, core.DTYPES[dtype]) == pytest.approx(wanted, rel=1e-5)
    assert core.squares(np.ones(4, np.int32).ctypes.data, 4, core.DTYPES["int32"]) == 0
