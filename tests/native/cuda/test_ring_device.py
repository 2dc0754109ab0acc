"""All-reduces of memory on a device: the same bits as in host memory and as the dumb loop, with the CPU as the device
(everything at once) and with the CUDA binding over a driver without a GPU (everything late); aborts and failures."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ftar_core.native import core

from ..cluster import NUMPY_TYPES, Array, Cluster, new_epoch, random_array, ring_sum
from .fake import Fake, fake_gpu

if TYPE_CHECKING:
    from ftar_core.native._core import Device

SEED = int(os.environ.get("FTAR_SEED", random.SystemRandom().randrange(1 << 30)))
SIZES = [0, 1, 3, 1023, 2048, 2049, 8193, 70_003, 300_001]  # 300,001: beyond the small way of two members


class Bench:
    """A cluster in which each member has its memory where `where` says: host, cpu (a device), gpu (the fake)."""

    def __init__(self, where: Sequence[str], gpu: Fake | None = None, slots: int = 128, **settings: int | str) -> None:
        self.where, self.gpu = list(where), gpu
        self.cluster = Cluster(len(where), **settings)
        self.devices: list[Device | None] = []
        for engine, place in zip(self.cluster.engines, where, strict=True):
            device = None
            if place == "cpu":
                device = core.host_device()
            elif place == "gpu":
                assert gpu is not None
                device = gpu.device()
            if device is not None:
                engine.use_device(device, slots)
            self.devices.append(device)
        self.kept: list[Array] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.__exit__(None, None, None)
        self.devices.clear()

    def put(self, i: int, values: Array) -> int:
        if self.where[i] == "gpu":
            assert self.gpu is not None
            return self.gpu.put(values)
        copy = values.copy()
        self.kept.append(copy)
        return int(copy.ctypes.data)

    def get(self, i: int, address: int, like: Array) -> Array:
        if self.where[i] == "gpu":
            assert self.gpu is not None
            return self.gpu.get(address, like)
        (found,) = [a for a in self.kept if int(a.ctypes.data) == address]
        return found

    def submit(self, i: int, epoch: bytes, step: int, bucket: int, src: int, dst: int, like: Array, dtype: str) -> None:
        self.cluster.engines[i].submit(
            epoch, step, bucket, src, dst, like.size, core.DTYPES[dtype], self.where[i] != "host"
        )

    def all_reduce(self, epoch: bytes, step: int, jobs: Sequence[tuple[Sequence[Array], str]]) -> None:
        """Every job a bucket, all at once; checks every result and that the inputs are as they were."""
        order = random.Random(step)
        n = len(self.where)
        src = [[self.put(i, job[0][i]) for job in jobs] for i in range(n)]
        dst = [[self.put(i, np.zeros_like(job[0][i])) for job in jobs] for i in range(n)]
        todo = [(i, b) for i in range(n) for b in range(len(jobs))]
        order.shuffle(todo)
        for i, b in todo:
            self.submit(i, epoch, step, b, src[i][b], dst[i][b], jobs[b][0][i], jobs[b][1])
        for i, b in todo:
            self.cluster.reduced(i, epoch, step, b)
        for b, (sources, dtype) in enumerate(jobs):
            wanted = ring_sum(sources, dtype).tobytes()
            for i in range(n):
                assert self.get(i, dst[i][b], sources[i]).tobytes() == wanted, (i, b, dtype, sources[i].size)
                assert self.get(i, src[i][b], sources[i]).tobytes() == sources[i].tobytes(), "inputs must survive"


def jobs_of(rng: np.random.Generator, members: int, sizes: Sequence[int]) -> list[tuple[list[Array], str]]:
    return [([random_array(rng, n, d) for _ in range(members)], d) for d in NUMPY_TYPES for n in sizes]


@pytest.mark.parametrize("where", [["cpu"], ["cpu"] * 2, ["cpu"] * 3, ["cpu", "host", "cpu", "host"]], ids=str)
def test_the_cpu_as_a_device_gives_the_bits_of_host_memory(where: list[str]) -> None:
    rng = np.random.default_rng(len(where))
    with Bench(where, chunk_bytes=4096, window_bytes=65536) as bench:
        epoch = bench.cluster.start()
        bench.all_reduce(epoch, 1, jobs_of(rng, len(where), SIZES[:8]))


@pytest.mark.parametrize("where", [["gpu"], ["gpu"] * 2, ["gpu"] * 3, ["gpu", "host", "cpu", "gpu"]], ids=str)
def test_a_late_device_gives_the_bits_of_host_memory(where: list[str]) -> None:
    rng = np.random.default_rng(len(where))
    with fake_gpu(seed=SEED, delay_us=200) as gpu, Bench(where, gpu, chunk_bytes=16384, window_bytes=65536) as bench:
        epoch = bench.cluster.start()
        bench.all_reduce(epoch, 1, jobs_of(rng, len(where), SIZES))


@pytest.mark.parametrize("mode", ["backup", "stripe"])
@pytest.mark.parametrize("slots", [4, 5, 9])
def test_a_handful_of_slots_is_enough(mode: str, slots: int) -> None:
    """Two rails, on which messages come out of order, and no more than two slots to receive into."""
    rng = np.random.default_rng(12)
    where = ["gpu", "cpu", "gpu"]
    settings: dict[str, int | str] = {"chunk_bytes": 2048, "window_bytes": 1 << 20, "mode": mode}
    with fake_gpu(seed=SEED, delay_us=30) as gpu, Bench(where, gpu, slots, **settings) as bench:
        epoch = bench.cluster.start()
        sizes = [60_000, 3, 90_001, 2500]
        bench.all_reduce(epoch, 1, [([random_array(rng, n, "float32") for _ in where], "float32") for n in sizes])


def specials(dtype: str) -> Array:
    """Every pair of values at which roundings go wrong: NaN, infinities, zeros, subnormals, halves, the largest."""
    width = np.dtype(NUMPY_TYPES[dtype]).itemsize
    if dtype == "float64":
        bits = [
            0,
            1,
            1 << 63,
            0x7FF << 52,
            0xFFF << 52,
            (0x7FF << 52) + 5,
            (0x7FF << 52) - 1,
            0x3FF << 52,
            (0x3CA << 52) + 1,
        ]
        return np.array(bits, np.uint64).view(np.float64)
    if dtype == "float32":
        bits = [0, 1, 0x007FFFFF, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F7FFFFF, 0x3F800000, 0x33800001]
        return np.array(bits, np.uint32).view(np.float32)
    assert width == 2
    return np.arange(0, 1 << 16, 37, dtype=np.uint16).view(NUMPY_TYPES[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_the_kernels_round_like_the_cpu_where_it_is_hard(dtype: str) -> None:
    values = specials(dtype)
    some = values if values.size < 100 else np.random.default_rng(1).choice(values, 300)
    left, right = np.repeat(some, some.size), np.tile(some, some.size)
    assert left.nbytes > 8192 or dtype in {"float32", "float64"}
    left, right = (np.resize(v, max(v.size, 40_000)) for v in (left, right))  # beyond the small way
    with fake_gpu() as gpu, Bench(["gpu", "host"], gpu) as bench:
        epoch = bench.cluster.start()
        results = []
        src = [bench.put(0, left), bench.put(1, right)]
        dst = [bench.put(i, np.zeros_like(left)) for i in (0, 1)]
        for i in (0, 1):
            bench.submit(i, epoch, 1, 0, src[i], dst[i], left, dtype)
        for i in (0, 1):
            bench.cluster.reduced(i, epoch, 1, 0)
            results.append(bench.get(i, dst[i], left).tobytes())
        half = left.size // 2  # member 1 adds on the host in one half, member 0 on the device in the other
        assert results[0] == results[1]
        one, other = left.copy(), right.copy()
        core.sum_into(one.ctypes.data, other.ctypes.data, one.size, core.DTYPES[dtype])
        assert results[0][: half * one.itemsize] == one.tobytes()[: half * one.itemsize]
        assert results[0] == one.tobytes()


@pytest.mark.parametrize("mode", ["backup", "stripe"])
def test_more_chunks_than_slots_and_many_buckets_at_once(mode: str) -> None:
    """A window much larger than the slots, and members that submit in any order: nobody waits for ever for a slot."""
    rng = np.random.default_rng(11)
    where = ["gpu", "gpu", "cpu"]
    settings: dict[str, int | str] = {"chunk_bytes": 4096, "window_bytes": 4 << 20, "mode": mode}
    with fake_gpu(seed=SEED, delay_us=50) as gpu, Bench(where, gpu, **settings) as bench:
        epoch = bench.cluster.start()
        for step in range(2):
            sizes = [700_000, 3, 400_000, 2500]
            bench.all_reduce(
                epoch, step, [([random_array(rng, n, "float32") for _ in where], "float32") for n in sizes]
            )


@pytest.mark.parametrize("where", [["gpu", "gpu"], ["gpu", "cpu", "host"]], ids=str)
def test_storm_of_aborts_costs_no_byte(where: list[str]) -> None:
    """Aborted at any moment; the moment abort has returned, buffers are the caller's: what he writes there stays."""
    seed = SEED
    print("FTAR_SEED", seed)
    chance = random.Random(seed)
    rng = np.random.default_rng(seed)
    n = len(where)
    with fake_gpu(seed=seed, delay_us=300) as gpu, Bench(where, gpu, chunk_bytes=8192, window_bytes=1 << 20) as bench:
        sources = [[random_array(rng, count, "float32") for _ in where] for count in (900, 60_000, 150_001)]
        src = [[bench.put(i, s[i]) for s in sources] for i in range(n)]
        dst = [[bench.put(i, np.zeros_like(s[i])) for s in sources] for i in range(n)]
        wanted = [ring_sum(s, "float32").tobytes() for s in sources]
        for _ in range(12):
            epoch = bench.cluster.start()
            whole = chance.random() < 0.4
            for b, s in enumerate(sources):
                for i in range(n):
                    if whole or chance.random() < 0.9:
                        bench.submit(i, epoch, 1, b, src[i][b], dst[i][b], s[i], "float32")
            if whole:
                for b in range(len(sources)):
                    for i in range(n):
                        bench.cluster.reduced(i, epoch, 1, b)
                        assert bench.get(i, dst[i][b], sources[b][i]).tobytes() == wanted[b]
                continue
            time.sleep(chance.random() * 0.02)
            for i in chance.sample(range(n), n):
                bench.cluster.engines[i].abort()
                if where[i] == "host":
                    continue
                marks = [np.full_like(s[i], 7.0) for s in sources]
                for b, mark in enumerate(marks):
                    target = bench.get(i, dst[i][b], mark)
                    if where[i] == "gpu":
                        gpu.write(dst[i][b], mark)
                    else:
                        target[:] = mark
                time.sleep(0.002)
                for b, mark in enumerate(marks):
                    assert bench.get(i, dst[i][b], mark).tobytes() == mark.tobytes(), "a late byte"
                    assert bench.get(i, src[i][b], mark).tobytes() == sources[b][i].tobytes()
    assert gpu.pinned_blocks() == 0


def test_a_new_epoch_reduces_the_same_inputs_again_with_other_members() -> None:
    rng = np.random.default_rng(5)
    with fake_gpu(seed=SEED, delay_us=100) as gpu, Bench(["gpu"] * 3, gpu, chunk_bytes=16384) as bench:
        epoch = bench.cluster.start()
        sources = [random_array(rng, 200_000, "bfloat16") for _ in range(3)]
        src = [bench.put(i, s) for i, s in enumerate(sources)]
        dst = [bench.put(i, np.zeros_like(s)) for i, s in enumerate(sources)]
        for i in (0, 1):  # the third never comes
            bench.submit(i, epoch, 4, 0, src[i], dst[i], sources[i], "bfloat16")
        bench.cluster.engines[2].close()
        for i in (0, 1):
            failed = bench.cluster.wait(i, lambda e: e["type"] == "failed")
            assert (failed["step"], failed["bucket"]) == (4, 0)
        again = bench.cluster.start([0, 1])
        for i in (0, 1):
            bench.submit(i, again, 4, 0, src[i], dst[i], sources[i], "bfloat16")
        for i in (0, 1):
            bench.cluster.reduced(i, again, 4, 0)
            assert bench.get(i, dst[i], sources[i]).tobytes() == ring_sum(sources[:2], "bfloat16").tobytes()


@pytest.mark.parametrize("how", ["task", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuLaunchKernel", "cuEventRecord"])
def test_a_device_that_fails_fails_the_bucket_with_the_drivers_word(how: str) -> None:
    values = np.ones(400_000, np.float32)
    with fake_gpu(seed=SEED, delay_us=50) as gpu, Bench(["gpu", "host"], gpu) as bench:
        epoch = bench.cluster.start()
        src, dst = [[bench.put(i, v) for i in (0, 1)] for v in (values, np.zeros_like(values))]
        if how == "task":
            gpu.set("fail_task", 5)
        else:
            gpu.fail(how, 2)
        for i in (0, 1):
            bench.submit(i, epoch, 1, 0, src[i], dst[i], values, "float32")
        failed = bench.cluster.wait(0, lambda e: e["type"] in {"failed", "reduced"})
        assert failed["type"] == "failed"
        assert "cuda:0 (Fake GPU): " in failed["reason"]
        name = "CUDA_ERROR_ILLEGAL_ADDRESS" if how == "task" else "CUDA_ERROR_LAUNCH_FAILED"
        assert name in failed["reason"]
        other = bench.cluster.wait(1, lambda e: e["type"] in {"failed", "reduced"})
        assert other["type"] == "failed"
        # For good: the next operation fails at once.
        device = bench.devices[0]
        assert device is not None
        assert name in device.failure()


def test_what_a_failure_ended_does_not_count_as_done() -> None:
    """The very last piece of work fails: its event comes all the same."""
    values = np.ones(5_000, np.float32)
    with fake_gpu(delay_us=40_000) as gpu, Bench(["gpu"], gpu) as bench:  # later than the submission
        epoch = bench.cluster.start()
        gpu.set("fail_task", 0)
        bench.submit(0, epoch, 1, 0, bench.put(0, values), bench.put(0, np.zeros_like(values)), values, "float32")
        end = bench.cluster.wait(0, lambda e: e["type"] in {"failed", "reduced"})
        assert end["type"] == "failed"
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in end["reason"]


def test_no_pinned_memory_is_one_clear_error_and_the_engine_goes_on_without_a_device() -> None:
    with fake_gpu() as gpu, Cluster(1) as cluster:
        device = gpu.device()
        gpu.set("pinned_limit", 1000)
        with pytest.raises(RuntimeError, match="cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY"):
            cluster.engines[0].use_device(device)
        epoch = cluster.start()
        with pytest.raises(ValueError, match="no device: use_device comes first"):
            cluster.engines[0].submit(epoch, 1, 0, 4096, 8192, 4, 0, True)
        source = np.arange(5, dtype=np.float32)
        (result,) = cluster.all_reduce(epoch, 1, 1, [source], "float32")
        assert (result == source).all()


def test_one_device_an_engine() -> None:
    with Cluster(1) as cluster:
        with pytest.raises(ValueError, match="most_slots is 3, but must be between 4 and 128"):
            cluster.engines[0].use_device(core.host_device(), 3)
        cluster.engines[0].use_device(core.host_device())
        with pytest.raises(ValueError, match="has a device already: cpu"):
            cluster.engines[0].use_device(core.host_device())
        cluster.engines[0].submit(new_epoch(), 1, 0, 4096, 8192, 4, 0, True)  # another epoch: ignored


def test_pinned_memory_is_bounded_whatever_the_bucket() -> None:
    with fake_gpu() as gpu, Cluster(1) as cluster:
        device = gpu.device()
        gpu.set("pinned_limit", 64 << 20)
        cluster.engines[0].use_device(device)
        assert device.failure() == ""


def test_host_memory_of_the_same_engine_takes_no_device() -> None:
    values = np.ones(300_000, np.float32)
    with fake_gpu() as gpu, Bench(["gpu", "gpu"], gpu) as bench:
        epoch = bench.cluster.start()
        before = gpu.calls("cuMemcpyHtoDAsync") + gpu.calls("cuMemcpyDtoHAsync")
        for result in bench.cluster.all_reduce(epoch, 1, 0, [values, values], "float32"):
            assert (result == 2).all()
        assert gpu.calls("cuMemcpyHtoDAsync") + gpu.calls("cuMemcpyDtoHAsync") == before
