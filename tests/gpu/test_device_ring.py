"""The ring on memory of a real GPU: the bits of host memory, aborts while it is busy, its speed beside bare copies,
and gradients that stay there.

Skipped without a device. All members of a ring share the one GPU; links are the loopback's."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from ftar_core.native import core
from ftar_core.training.devices import CudaLane, lanes_of
from ftar_core.training.gradients import GradientTaker, Mode
from ftar_core.training.memories import DeviceMemory, HostMemory, memory_for
from ftar_core.training.plan import DTYPE_CODES, make_plan
from tests.gpu.figures import note
from tests.native.cluster import Cluster

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or a torch without CUDA"),
]
DEVICE = "cuda"


def cluster(members: int) -> Cluster:
    made = Cluster(members)
    for engine in made.engines:
        engine.use_device(core.cuda_device(0, timeout_ms=30_000))
    return made


def submit(made: Cluster, i: int, epoch: bytes, step: int, bucket: int, src: torch.Tensor, dst: torch.Tensor) -> None:
    there = src.device.type != "cpu"
    torch.cuda.synchronize()
    code = DTYPE_CODES[src.dtype]
    made.engines[i].submit(epoch, step, bucket, src.data_ptr(), dst.data_ptr(), src.numel(), code, there)


def values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, (count,), dtype=dtype, generator=generator)
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (count,), dtype=torch.int64, generator=generator).to(torch.int32)
    width = torch.empty(0, dtype=dtype).element_size()
    if width == 2:  # every pattern of bits: NaN, infinities, subnormals
        return bits.view(torch.int16)[:count].view(dtype)
    return bits.view(dtype) if width == 4 else torch.randn(count, dtype=dtype, generator=generator)


@pytest.mark.parametrize("dtype", list(DTYPE_CODES))
@pytest.mark.parametrize("count", [5, 5_000, 3_000_001])
def test_the_gpu_adds_to_the_bits_of_host_memory(dtype: torch.dtype, count: int) -> None:
    """Three members: two with memory there, one in host memory; and the same once more, all in host memory."""
    sources = [values(count, dtype, seed) for seed in range(3)]
    with cluster(3) as made:
        epoch = made.start()
        results = []
        for step, there in enumerate(([True, True, False], [False] * 3)):
            src = [s.to(DEVICE) if on else s for s, on in zip(sources, there, strict=True)]
            dst = [torch.zeros_like(s) for s in src]
            for i in range(3):
                submit(made, i, epoch, step, 0, src[i], dst[i])
            for i in range(3):
                made.reduced(i, epoch, step, 0)
            results += [d.cpu().view(torch.uint8) for d in dst]
            assert all(
                torch.equal(s.cpu().view(torch.uint8), o.view(torch.uint8)) for s, o in zip(src, sources, strict=True)
            )
    assert all(torch.equal(results[0], r) for r in results[1:])


@pytest.mark.parametrize("dtype", list(DTYPE_CODES))
def test_digests_of_the_gpu_are_those_of_a_copy(dtype: torch.dtype) -> None:
    native = core.cuda_device(0)
    for count in (0, 1, 63, 64, 65, 100_003):
        for poison in (False, True):
            host = torch.ones(count, dtype=dtype)
            if poison and count and dtype.is_floating_point:
                host[count // 2] = float("nan")
            there = host.to(DEVICE)
            torch.cuda.synchronize()
            code = DTYPE_CODES[dtype]
            assert native.check([(there.data_ptr(), count, code, 7)]) == [core.check(host.data_ptr(), count, code, 7)]


def test_an_abort_while_the_gpu_is_busy_leaves_no_late_byte() -> None:
    """The training's kernels run all the while, and the ring is aborted in the middle: what is written afterwards
    stays, and abort itself takes no longer than copies under way."""
    x = torch.randn(4096, 4096, device=DEVICE)
    src = [torch.randn(20_000_000, device=DEVICE) for _ in range(2)]
    dst = [torch.zeros_like(s) for s in src]
    longest_s = 0.0
    with cluster(2) as made:
        for turn in range(10):
            epoch = made.start()
            for i in (0, 1):
                submit(made, i, epoch, turn, 0, src[i], dst[i])
            for _ in range(20):
                x = (x @ x).tanh()
            time.sleep(0.002 * turn)
            for i in (0, 1):
                began = time.perf_counter()
                made.engines[i].abort()
                longest_s = max(longest_s, time.perf_counter() - began)
                dst[i].fill_(7.0)
            time.sleep(0.01)
            torch.cuda.synchronize()
            assert all(bool((d == 7.0).all()) for d in dst), "a late byte"
        epoch = made.start()  # and the GPU, and the ring, go on
        for i in (0, 1):
            submit(made, i, epoch, 100, 0, src[i], dst[i])
        for i in (0, 1):
            made.reduced(i, epoch, 100, 0)
        assert torch.equal(dst[0], src[0] + src[1])
    note("abort", longest_ms=longest_s * 1e3)
    assert longest_s < 2.0


def test_bandwidth_of_the_ring_on_the_gpu_beside_host_memory_and_bare_copies() -> None:
    count = 1 << 26  # 256 MiB of float32
    size = count * 4
    pinned = torch.zeros(count, pin_memory=True)
    there = torch.zeros(count, device=DEVICE)
    gigabytes: dict[str, float] = {}
    for name, target, source in (("copy to host", pinned, there), ("copy to device", there, pinned)):
        best = 1e9
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        gigabytes[name] = size / best / 1e9
    with cluster(2) as made:
        epoch = made.start()
        step = 0
        for name, where in (("ring, device", DEVICE), ("ring, host", "cpu")):
            src = [torch.ones(count, device=where) for _ in range(2)]
            dst = [torch.zeros(count, device=where) for _ in range(2)]
            best = 1e9
            for _ in range(4):
                step += 1
                began = time.perf_counter()
                for i in (0, 1):
                    submit(made, i, epoch, step, 0, src[i], dst[i])
                for i in (0, 1):
                    made.reduced(i, epoch, step, 0)
                best = min(best, time.perf_counter() - began)
            assert all(bool((d == 2.0).all()) for d in dst)
            gigabytes[name] = size / best / 1e9  # of the bucket: each member sends and receives as much
    note("device ring", bytes=size, **{"GB/s": gigabytes})


def test_a_session_keeps_its_gradients_there_and_gives_them_back_without_a_copy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 256)).to(DEVICE)
    plan, lanes = make_plan(model, 1 << 20), lanes_of(model.parameters())
    memory = memory_for("device", plan, lanes)
    assert isinstance(memory, DeviceMemory)
    assert isinstance(memory.lane, CudaLane)
    announced: list[int] = []
    taker = GradientTaker(model, plan, announced.append, lanes=lanes, memory=memory)
    x = torch.randn(64, 512, device=DEVICE)
    model(x).square().sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for weight in (1.0, 3.0, 0.0):
        announced.clear()
        taker.begin(Mode.TAKE)
        taker.weight = weight
        model(x).square().sum().backward()
        taker.finish(tokens=64, loss=1.0)
        assert sorted(announced) == list(range(len(plan.all_buckets)))
        for mine, result in zip(taker.retained, taker.reduced, strict=True):
            result.copy_(mine)
        torch.cuda.synchronize()
        found = memory.check([(i, taker.reduced[i]) for i in range(len(announced))])
        assert found == HostMemory().check([(i, taker.reduced[i].cpu()) for i in range(len(announced))])
        assert taker.own_norm == pytest.approx(
            float(torch.cat([g.reshape(-1) for g in expected.values()]).norm()) if weight else 0.0, rel=1e-4
        )
        taker.give_back()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, expected[name] * weight), name
            slot = plan.slots[name]
            assert parameter.grad.data_ptr() == taker.reduced[slot.bucket][slot.offset :].data_ptr()
    taker.close()
