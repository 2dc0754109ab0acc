"""Gradients that are reduced on their device, through the wiring that CUDA runs: what the ring is given, when, and that
jobs come to the same bits as with host memory."""

from __future__ import annotations

import ctypes
import select
import time

import pytest
import torch
from torch import nn

from ftar_core.errors import SettingsError
from ftar_core.native import core
from ftar_core.training.devices import Event
from ftar_core.training.gradients import GradientTaker, Mode
from ftar_core.training.memories import DeviceMemory, HostMemory, memory_for
from ftar_core.training.plan import DTYPE_CODES, BucketPlan, make_plan
from ftar_core.training.retention import inputs_for
from tests.native.cuda.fake import Fake, fake_gpu

from .conftest import Job
from .ondevice import HERE, PromptLane
from .test_gradients import TwoHeads, reference


def on_device(plan: BucketPlan) -> tuple[DeviceMemory, PromptLane]:
    lane = PromptLane()
    return DeviceMemory(plan, HERE, lane, core.host_device()), lane


def test_gradients_stay_where_they_are_and_results_are_given_back_without_a_copy() -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    plan = make_plan(model, 100)
    memory, lane = on_device(plan)
    announced: list[int] = []
    taker = GradientTaker(model, plan, announced.append, lanes={HERE: lane}, memory=memory)
    taker.begin(Mode.TAKE)
    taker.weight = 3.0
    x = torch.randn(5, 4)
    model(x).backward()
    taker.finish(tokens=5, loss=2.5)
    expected = reference(x)
    assert sorted(announced) == list(range(len(plan.all_buckets)))
    assert memory.on_device == frozenset(range(len(plan.buckets))), "all but the tally"
    for mine, result in zip(taker.retained, taker.reduced, strict=True):
        result.copy_(mine)
    taker.average()
    taker.give_back()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        slot = plan.slots[name]
        assert parameter.grad.data_ptr() == taker.reduced[slot.bucket][slot.offset :].data_ptr(), name
        torch.testing.assert_close(parameter.grad, expected.get(name, torch.zeros_like(parameter)))
    assert lane.fetched
    assert lane.zeroed, "what has no gradient"
    assert lane.brought == 0
    norm = torch.cat([g.reshape(-1) for g in expected.values()]).norm()
    assert taker.own_norm == pytest.approx(float(norm), rel=1e-5)
    taker.close()


def test_digests_of_device_and_host_are_comparable() -> None:
    plan = make_plan(TwoHeads(), 100)
    memory, _ = on_device(plan)
    buckets = [(b.index, torch.randn(b.count, dtype=torch.float64).to(b.dtype)) for b in plan.all_buckets]
    buckets[1][1][0] = float("inf")
    found = memory.check(buckets)
    assert found == HostMemory().check(buckets)
    assert [finite for _, finite in found].count(False) == 1
    assert memory.check([]) == []


class SlowLane(PromptLane):
    """What reads the results ends when the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[SlowLane.Reading] = []

    class Reading:
        def __init__(self) -> None:
            self.over = False

        def wait(self) -> None:
            deadline = time.monotonic() + 60
            while not self.over:
                assert time.monotonic() < deadline
                time.sleep(0.001)

    def used(self) -> Event:
        reading = SlowLane.Reading()
        self.reads.append(reading)
        return reading


def test_the_ring_writes_no_result_that_an_update_still_reads() -> None:
    model = TwoHeads()
    plan = make_plan(model, 100)
    lane = SlowLane()
    announced: list[int] = []
    memory = DeviceMemory(plan, HERE, lane, core.host_device())
    taker = GradientTaker(model, plan, announced.append, lanes={HERE: lane}, memory=memory)
    taker.begin(Mode.TAKE)
    model(torch.randn(5, 4)).backward()
    time.sleep(0.05)
    assert announced == []
    for reading in lane.reads:
        reading.over = True
    taker.finish(tokens=5, loss=None)
    assert sorted(announced) == list(range(len(plan.all_buckets)))
    taker.close()


class FakeLane(PromptLane):
    """Of the fake GPU's memory: tensors whose address is there, which the host cannot touch."""

    def __init__(self, gpu: Fake) -> None:
        super().__init__()
        self.gpu = gpu

    def tensor(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        size = max(1, count) * dtype.itemsize
        memory = (ctypes.c_char * size).from_address(self.gpu.alloc(size))
        return torch.frombuffer(memory, dtype=dtype, count=count)

    def fetch(self, target: torch.Tensor, source: torch.Tensor, weight: float) -> object:
        self.gpu.write(target.data_ptr(), (source * weight).to(target.dtype).contiguous().view(-1).numpy())
        return source

    def clear(self, target: torch.Tensor) -> None:
        self.gpu.write(target.data_ptr(), torch.zeros(target.shape, dtype=target.dtype).view(-1).numpy())


def test_two_replicas_on_a_gpu_that_the_host_cannot_touch() -> None:
    """Hooks, staging, ring, digests: with addresses of the (fake) device from one end to the other."""
    torch.manual_seed(0)
    x = [torch.randn(5, 4) for _ in range(2)]
    with fake_gpu(delay_us=100) as gpu:
        engines = [core.Engine("job", b"t", f"r{i}", i + 1, [("lo", "", "127.0.0.1")], core.Options()) for i in (0, 1)]
        members = [{"name": f"r{i}", "incarnation": i + 1, "rails": e.endpoints()} for i, e in enumerate(engines)]
        takers, memories, epoch = [], [], b"e" * 16
        for i, engine in enumerate(engines):
            engine.prepare(epoch, members, i)  # type: ignore[arg-type]
            engine.activate(epoch)
            torch.manual_seed(0)
            model = TwoHeads()
            plan, lane, native = make_plan(model, 100), FakeLane(gpu), gpu.device()
            engine.use_device(native)
            memory = DeviceMemory(plan, HERE, lane, native)
            memory.zeros = lane.tensor  # type: ignore[method-assign]

            def submit(bucket: int, i: int = i) -> None:
                b = takers[i].plan.all_buckets[bucket]
                source, target = takers[i].retained[bucket].data_ptr(), takers[i].reduced[bucket].data_ptr()
                there = bucket in memories[i].on_device
                engines[i].submit(epoch, 1, bucket, source, target, b.count, DTYPE_CODES[b.dtype], there)

            memories.append(memory)
            takers.append(GradientTaker(model, plan, submit, lanes={HERE: lane}, memory=memory))
            takers[i].begin(Mode.TAKE)
            model(x[i]).backward()
        for taker in takers:
            taker.finish(tokens=5, loss=1.0)
        sums = []
        for i, engine in enumerate(engines):
            left = set(range(len(takers[i].plan.all_buckets)))
            while left:
                assert select.select([engine.event_fd()], [], [], 60)[0]
                for event in engine.events():
                    assert event["type"] != "failed", event
                    if event["type"] == "reduced":
                        left.remove(event["bucket"])
            sums.append(memories[i].check(list(enumerate(takers[i].reduced))))
        assert sums[0] == sums[1]
        assert takers[0].total_tokens == 10
        wanted = [reference(x[0]), reference(x[1])]
        plan = takers[0].plan
        for name, slot in plan.slots.items():
            address = takers[0].reduced[slot.bucket].data_ptr() + slot.offset * 4
            got = gpu.get(address, torch.zeros(slot.count).numpy())
            total = sum(w.get(name, torch.zeros(slot.shape)) for w in wanted)
            torch.testing.assert_close(torch.from_numpy(got).view(slot.shape), total)
        for taker, engine in zip(takers, engines, strict=True):
            taker.close()
            engine.close()


def test_where_it_cannot_be_is_said() -> None:
    plan = make_plan(TwoHeads(), 100)
    with pytest.raises(SettingsError, match="must be on one GPU, but they are in host memory"):
        memory_for("device", plan, {})
    two = {torch.device("cuda", i): PromptLane() for i in (0, 1)}
    with pytest.raises(SettingsError, match="but they are on cuda:0, cuda:1"):
        memory_for("device", plan, two)
    assert isinstance(memory_for("host", plan, two), HostMemory)
    with pytest.raises(SettingsError, match="reduce='gpu': no such place"):
        memory_for("gpu", plan, two)
    memory, _ = on_device(plan)
    with pytest.raises(SettingsError, match="retain='host' with FTAR_REDUCE=device"):
        inputs_for(nn.Linear(1, 1), plan, "host", 0, 1, memory=memory)
    kept, retention = inputs_for(TwoHeads(), plan, "auto", 0, 1, memory=memory)
    assert (retention.mode, len(kept)) == ("device", len(plan.all_buckets))


def test_without_a_driver_the_session_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(ordinal: int) -> object:
        raise RuntimeError("the CUDA driver cannot be loaded: libcuda.so.1")

    monkeypatch.setattr(core, "cuda_device", missing)
    with pytest.raises(SettingsError, match="FTAR_REDUCE=device: the CUDA driver cannot be loaded"):
        memory_for("device", make_plan(TwoHeads(), 100), {torch.device("cuda", 0): PromptLane()})


def test_a_job_of_device_and_host_replicas_comes_to_the_same_bits_and_one_comes_back(job: Job) -> None:
    """One replica is killed and fetches its state from another; contributors with memory on a device and in host memory
    hold identical results all the while."""
    job.coordinator(replicas=3)
    job.start("r0", "r1", steps=0, step_ms=15, on_device=True)
    job.start("r2", steps=0, step_ms=15)
    job.wait_step("r0", 8)
    job.kill("r1")
    job.wait_step("r0", max(job.steps("r0")) + 5)
    job.start("r1", steps=0, step_ms=15, on_device=True)
    job.wait_contributes("r1", 2)
    job.finish("r0", "r1", "r2")
    job.assert_identical("r0", "r1", "r2")
    modes = {name: job.lines(name, "retain")[0]["mode"] for name in ("r0", "r1", "r2")}
    assert modes["r0"] == modes["r1"] == "device"
