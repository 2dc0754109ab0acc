"""The CUDA driver without a GPU (fake_cuda.cpp): built once a session of tests, loaded by the real binding."""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from ftar_core.native import core

if TYPE_CHECKING:
    from ftar_core.native._core import Device

ROOT = Path(__file__).resolve().parents[3]
KERNELS = ROOT / "ftar_core" / "native" / "csrc" / "cuda"
Array = npt.NDArray[np.generic]


def compiled(source: Path, name: str, *options: str) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++, which the fake CUDA driver is built with")
    folder = Path(tempfile.mkdtemp(prefix="ftar-fake-cuda-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = folder / name
    flags = ["-std=c++20", "-O2", "-g", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
    argv = [compiler, *flags, "-ffp-contract=off", *options, "-o", str(target), str(source), "-pthread"]
    subprocess.run(argv, check=True)
    return target


@lru_cache(maxsize=1)
def library() -> Path:
    return compiled(Path(__file__).with_name("fake_cuda.cpp"), "libfakecuda.so", f"-I{KERNELS}")


class Fake:
    """The library of this process, as a test sees it."""

    def __init__(self) -> None:
        self.path = str(library())
        self._c = ctypes.CDLL(self.path)
        self._c.fake_alloc.restype = ctypes.c_uint64
        self._c.fake_alloc.argtypes = [ctypes.c_size_t]
        self._c.fake_write.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]
        self._c.fake_read.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t]
        self._c.fake_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self._c.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
        self._c.fake_hang.argtypes = [ctypes.c_char_p]
        self._c.fake_calls.argtypes = [ctypes.c_char_p]
        self._c.fake_calls.restype = ctypes.c_long
        self._c.fake_pinned_blocks.restype = ctypes.c_long

    def set(self, what: str, value: int) -> None:
        """devices, seed, delay_us, pinned_limit, error (sticky); fail_task, hang_task: the so-many-th from here on."""
        self._c.fake_set(what.encode(), value)

    def fail(self, call: str, nth: int = 1, result: int = 719) -> None:
        self._c.fake_fail(call.encode(), nth, result)

    def hang(self, call: str) -> None:
        self._c.fake_hang(call.encode())

    def calls(self, call: str) -> int:
        return int(self._c.fake_calls(call.encode()))

    def pinned_blocks(self) -> int:
        return int(self._c.fake_pinned_blocks())

    def reset(self) -> None:
        for what, value in (("devices", 1), ("seed", 1), ("delay_us", 0), ("pinned_limit", 1 << 40)):
            self.set(what, value)
        for what in ("fail_task", "hang_task"):
            self.set(what, -1)
        self.set("error", 0)
        self.fail("", 0, 0)
        self.hang("")
        self._c.fake_free_all()

    def device(self, timeout_ms: int = 120_000) -> Device:
        return core.cuda_device(0, self.path, timeout_ms)

    def alloc(self, nbytes: int) -> int:
        address = int(self._c.fake_alloc(max(nbytes, 1)))
        assert address, "the fake GPU is full"
        return address

    def put(self, values: Array) -> int:
        """A copy on the device."""
        address = self.alloc(values.nbytes)
        self.write(address, values)
        return address

    def write(self, address: int, values: Array) -> None:
        self._c.fake_write(address, values.ctypes.data, values.nbytes)

    def get(self, address: int, like: Array) -> Array:
        out = np.zeros_like(like)
        self._c.fake_read(out.ctypes.data, address, out.nbytes)
        return out


@contextmanager
def fake_gpu(seed: int = 1, delay_us: int = 0) -> Iterator[Fake]:
    fake = Fake()
    fake.reset()
    fake.set("seed", seed)
    fake.set("delay_us", delay_us)
    try:
        yield fake
    finally:
        fake.reset()
