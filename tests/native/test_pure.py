"""Arithmetic, hashes and the frame parser, each against something simpler."""

from __future__ import annotations

import hashlib
import hmac
import random
import struct

import numpy as np
import pytest

from ftar_core.native import core

from .cluster import NUMPY_TYPES, Array, from_bfloat16, random_array, to_bfloat16


def sum_into(a: Array, b: Array, dtype: str) -> Array:
    out = a.copy()
    core.sum_into(out.ctypes.data, b.ctypes.data, out.size, core.DTYPES[dtype])
    return out


def test_every_float16_plus_zero_is_itself() -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    out = sum_into(every, np.zeros_like(every), "float16")
    finite = ~np.isnan(every)
    assert (out[finite] == every[finite]).all()
    assert np.isnan(out[~finite]).all()


@pytest.mark.parametrize("scale", [1e-7, 1e-5, 1.0, 3e4, 65504.0])
def test_float16_sums_round_as_numpy_rounds(scale: float) -> None:
    rng = np.random.default_rng(5)
    a, b = ((rng.uniform(-1, 1, 200_000) * scale).astype(np.float16) for _ in range(2))
    with np.errstate(over="ignore"):
        wanted = (a.astype(np.float32) + b.astype(np.float32)).astype(np.float16)
    assert (sum_into(a, b, "float16").view(np.uint16) == wanted.view(np.uint16)).all()


def test_every_bfloat16_pair_of_neighbouring_size_rounds_to_even() -> None:
    rng = np.random.default_rng(6)
    a, b = (rng.integers(0x3000, 0x5000, 300_000).astype(np.uint16) for _ in range(2))
    wanted = to_bfloat16(from_bfloat16(a) + from_bfloat16(b))
    assert (sum_into(a, b, "bfloat16") == wanted).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_nan_is_one_nan_whatever_made_it(dtype: str) -> None:
    kind = NUMPY_TYPES[dtype]
    nan, inf = kind(np.nan), kind(np.inf)
    a = np.array([nan, -nan, 1, inf, -nan] * 7, kind)
    b = np.array([1, 2, nan, -inf, nan] * 7, kind)
    assert len({v.tobytes() for v in sum_into(a, b, dtype)}) == 1


def test_subnormal_results_are_not_flushed() -> None:
    a = np.array([1e-40, 5e-324], np.float64)
    assert (sum_into(a, a, "float64") == 2 * a).all()
    b = np.array([1e-44] * 9, np.float32)
    assert (sum_into(b, b, "float32") == b + b).all()


def test_integers_wrap() -> None:
    a = np.array([2**31 - 1], np.int32)
    assert sum_into(a, np.array([1], np.int32), "int32")[0] == -(2**31)


def test_one_changed_byte_anywhere_changes_the_digest() -> None:
    rng = random.Random(1)
    data = bytearray(rng.randbytes(1000))
    for size in (0, 1, 7, 8, 31, 32, 33, 1000):
        array = np.frombuffer(bytes(data[:size]), np.uint8).copy()
        original = core.digest(array.ctypes.data, size, 3)
        assert original != core.digest(array.ctypes.data, size, 4)
        for at in range(size):
            array[at] ^= 1 << rng.randrange(8)
            assert core.digest(array.ctypes.data, size, 3) != original, (size, at)
            array[at] = data[at]
        assert core.digest(array.ctypes.data, size, 3) == original
    assert len({core.digest(np.zeros(64, np.uint8).ctypes.data, n, 0) for n in range(65)}) == 65


@pytest.mark.parametrize("dtype", list(NUMPY_TYPES))
def test_one_value_that_is_not_finite_is_found_anywhere(dtype: str) -> None:
    array = random_array(np.random.default_rng(2), 10_000, dtype)
    check = lambda: core.all_finite(array.ctypes.data, array.size, core.DTYPES[dtype])  # noqa: E731
    assert check()
    if dtype.startswith("int"):
        return
    for at in (0, 4095, 4096, 9_999):
        kept = array[at]
        for bad in (np.inf, -np.inf, np.nan):
            array[at] = to_bfloat16(np.array([bad], np.float32))[0] if dtype == "bfloat16" else bad
            assert not check()
        array[at] = kept
    assert check()


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000])
def test_hmac_is_the_standards(size: int) -> None:
    rng = random.Random(size)
    key, data = rng.randbytes(size), rng.randbytes(2 * size + 1)
    assert core.hmac_sha256(key, data) == hmac.new(key, data, hashlib.sha256).digest()


HEADER = struct.Struct("<4sBBHIIQQQQQII")


def frame(kind: int, length: int = 0, offset: int = 0, total: int = 0, magic: bytes = b"FTL2") -> bytes:
    return HEADER.pack(magic, kind, 0, 0, 1, length, 7, 0, offset, total, 1, 2, 3)


def test_frames_that_cannot_be_are_named() -> None:
    assert core.check_frame(frame(1, length=10, offset=5, total=15)) == ""
    assert core.check_frame(frame(1)) == "", "an empty message is a message"
    assert core.check_frame(frame(2)) == ""
    wrong = {
        "not a frame": frame(1, magic=b"GET "),
        "unknown type": frame(10),
        "beyond its message": frame(1, length=11, offset=5, total=15),
        "reaches beyond": frame(1, length=1, offset=2**64 - 1, total=2**64 - 1),
        "longer than the limit": frame(1, length=2**32 - 1, total=2**64 - 1),
        "empty part": frame(1, length=0, offset=1, total=2),
        "control frame longer": frame(7, length=10_000),
        "with a payload": frame(2, length=4),
        "64 bytes": b"short",
    }
    for words, header in wrong.items():
        assert words in core.check_frame(header)


def test_random_bytes_are_no_frame() -> None:
    rng = random.Random(4)
    assert all(core.check_frame(rng.randbytes(64)) for _ in range(20_000))
