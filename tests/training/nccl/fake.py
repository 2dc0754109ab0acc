"""Builds the fake libnccl, and a device in host memory on whose streams it works."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

from ftar_core.native import core
from ftar_core.training.devices import Event
from ftar_core.training.nccl.device import Device
from ftar_core.training.plan import DTYPE_CODES

SOURCE = Path(__file__).with_name("fake_nccl.cpp")
BUILD = Path(__file__).parents[3] / "build" / "fake-nccl"


def build(*flags: str) -> Path:
    """A libnccl.so.2 of the fake; built again only when its source has changed."""
    tag = hashlib.sha256(SOURCE.read_bytes() + repr(flags).encode()).hexdigest()[:16]
    made = BUILD / tag / "libnccl.so.2"
    if not made.exists():
        compiler = shutil.which("g++") or shutil.which("clang++")
        assert compiler is not None, "the fake libnccl needs a C++ compiler"
        made.parent.mkdir(parents=True, exist_ok=True)
        scratch = made.with_suffix(f".{os.getpid()}")
        command = [compiler, "-std=c++20", "-O1", "-g", "-Wall", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]
        subprocess.run([*command, *flags, "-o", str(scratch), str(SOURCE), "-lpthread"], check=True)
        scratch.rename(made)
    return made


class HostDevice:
    """Memory of the host, worked on by the fake's streams."""

    def __init__(self, library: Path) -> None:
        self._fake = fake = ctypes.CDLL(str(library))
        fake.fake_stream.restype = ctypes.c_void_p
        fake.fake_mark.argtypes, fake.fake_mark.restype = (ctypes.c_void_p,), ctypes.c_uint64
        fake.fake_wait.argtypes, fake.fake_wait.restype = (ctypes.c_void_p, ctypes.c_uint64), None
        fake.fake_copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        fake.fake_copy.restype = None
        self.stream: int = fake.fake_stream()
        self._back: int = fake.fake_stream()

    def enter(self) -> None:
        pass

    def memory(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def mark(self) -> Event:
        return _Mark(self._fake, self.stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        nbytes = source.numel() * source.element_size()
        self._fake.fake_copy(self._back, target.data_ptr(), source.data_ptr(), nbytes)
        return _Mark(self._fake, self._back)

    def squares(self, source: torch.Tensor) -> float:
        return core.squares(source.data_ptr(), source.numel(), DTYPE_CODES[source.dtype])

    def live(self) -> int:
        """Communicators of this process."""
        return int(self._fake.fake_live())


class _Mark:
    def __init__(self, fake: ctypes.CDLL, stream: int) -> None:
        self._fake, self._stream, self._at = fake, stream, fake.fake_mark(stream)

    def wait(self) -> None:
        self._fake.fake_wait(self._stream, self._at)


def _conforms(device: HostDevice) -> Device:
    return device
