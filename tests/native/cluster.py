"""Several engines in one process, and the dumb twin of their arithmetic."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ftar_core.native import core

from . import HEARTBEAT_MS, PATIENCE

if TYPE_CHECKING:
    from ftar_core.native._core import Engine, Event, LinkStat, Member, Options

Array = npt.NDArray[np.generic]
LOOPBACK = [("rail0", "", "127.0.0.1"), ("rail1", "", "127.0.0.2")]
NUMPY_TYPES = {  # bfloat16 is stored in the upper half of a float32
    "float32": np.float32,
    "float64": np.float64,
    "bfloat16": np.uint16,
    "float16": np.float16,
    "int32": np.int32,
    "int64": np.int64,
}


def options(**settings: int | str) -> Options:
    made = core.Options()
    made.heartbeat_ms = HEARTBEAT_MS
    for name, value in settings.items():
        assert hasattr(made, name), name
        setattr(made, name, value)
    return made


def new_epoch() -> bytes:
    return os.urandom(16)


class Cluster:
    """n engines r0, r1, ... on two loopback rails; collects every event."""

    def __init__(
        self, n: int, rails: Sequence[tuple[str, str, str]] = LOOPBACK, token: bytes = b"secret", **settings: int | str
    ) -> None:
        self.engines: list[Engine] = []
        self.seen: list[list[Event]] = [[] for _ in range(n)]
        for i in range(n):
            self.engines.append(core.Engine("job", token, f"r{i}", i + 1, list(rails), options(**settings)))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for engine in self.engines:
            engine.close()

    def member(self, i: int) -> Member:
        return {"name": f"r{i}", "incarnation": i + 1, "rails": self.engines[i].endpoints()}

    def prepare(self, epoch: bytes, who: Sequence[int]) -> None:
        members = [self.member(i) for i in who]
        for slot, i in enumerate(who):
            self.engines[i].prepare(epoch, members, slot)

    def activate(self, epoch: bytes, who: Iterable[int]) -> None:
        for i in who:
            self.engines[i].activate(epoch)

    def start(self, who: Sequence[int] | None = None) -> bytes:
        """A new epoch of these members, active, all links up."""
        who = list(range(len(self.engines))) if who is None else who
        epoch = new_epoch()
        self.prepare(epoch, who)
        self.activate(epoch, who)
        for i in who:
            self.wait(i, lambda e: e["type"] == "ready" and e["epoch"] == epoch)
        return epoch

    def collect(self, i: int, timeout_s: float = 0.0) -> list[Event]:
        select.select([self.engines[i].event_fd()], [], [], timeout_s)
        new = self.engines[i].events()
        self.seen[i].extend(new)
        return new

    def wait(self, i: int, wanted: Callable[[Event], bool], timeout_s: float = 60.0) -> Event:
        """The first event, seen before or still to come, that is wanted."""
        deadline = time.monotonic() + timeout_s * PATIENCE
        looked = 0
        while True:
            for event in self.seen[i][looked:]:
                if wanted(event):
                    return event
            looked = len(self.seen[i])
            if time.monotonic() > deadline:
                raise AssertionError(f"r{i}: no such event; seen {self.seen[i][-8:]}, links {self.links(i)}")
            self.collect(i, 0.1)

    def types(self, i: int) -> list[str]:
        self.collect(i)
        return [e["type"] for e in self.seen[i]]

    def links(self, i: int) -> list[LinkStat]:
        return self.engines[i].links()

    def submit(self, i: int, epoch: bytes, step: int, bucket: int, src: Array, dst: Array, dtype: str) -> None:
        self.engines[i].submit(epoch, step, bucket, src.ctypes.data, dst.ctypes.data, src.size, core.DTYPES[dtype])

    def reduced(self, i: int, epoch: bytes, step: int, bucket: int, timeout_s: float = 60.0) -> None:
        def done(e: Event) -> bool:
            return e["type"] in {"reduced", "failed"} and (e["epoch"], e["step"], e["bucket"]) == (epoch, step, bucket)

        event = self.wait(i, done, timeout_s)
        assert event["type"] == "reduced", event

    def all_reduce(self, epoch: bytes, step: int, bucket: int, sources: Sequence[Array], dtype: str) -> list[Array]:
        results = [np.zeros_like(s) for s in sources]
        for i, (src, dst) in enumerate(zip(sources, results, strict=True)):
            self.submit(i, epoch, step, bucket, src, dst, dtype)
        for i in range(len(sources)):
            self.reduced(i, epoch, step, bucket)
        return results


def random_array(rng: np.random.Generator, count: int, dtype: str) -> Array:
    if dtype in {"int32", "int64"}:
        info = np.iinfo(NUMPY_TYPES[dtype])
        return rng.integers(info.min, info.max, count, dtype=NUMPY_TYPES[dtype])
    values = (rng.standard_normal(count) * np.exp(rng.uniform(-8, 8, count))).astype(np.float32)
    return to_bfloat16(values) if dtype == "bfloat16" else values.astype(NUMPY_TYPES[dtype])


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest even, the slow and obvious way: look at both neighbours."""
    bits = values.view(np.uint32).astype(np.uint64)
    low = (bits >> 16) << 16
    rest = bits - low
    up = (rest > 0x8000) | ((rest == 0x8000) & ((low >> 16) % 2 == 1))
    return ((low >> 16) + up.astype(np.uint64)).astype(np.uint16)


def from_bfloat16(values: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (values.astype(np.uint32) << 16).view(np.float32)


def add(a: Array, b: Array, dtype: str) -> Array:
    with np.errstate(all="ignore"):
        if dtype == "bfloat16":
            return to_bfloat16(from_bfloat16(a.astype(np.uint16)) + from_bfloat16(b.astype(np.uint16)))
        if dtype == "float16":
            return (a.astype(np.float32) + b.astype(np.float32)).astype(np.float16)
        return a + b


def ring_sum(sources: Sequence[Array], dtype: str) -> Array:
    """The dumb twin: segment g is summed in the order g, g+1, ... around the ring."""
    n, count = len(sources), sources[0].size
    out = np.empty_like(sources[0])
    for g in range(n):
        part = slice(g * count // n, (g + 1) * count // n)
        total = sources[g][part]
        for k in range(1, n):
            total = add(total, sources[(g + k) % n][part], dtype)
        out[part] = total
    return out
