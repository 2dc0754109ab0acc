"""The lane of a real GPU: right values, and how fast its copies are beside one bare copy of as much pinned memory.

Skipped without a device. `tests/gpu/run.sh` runs these and writes the figures into the JSON file FTAR_GPU_FIGURES."""

import time

import pytest
import torch
from torch import nn

from ftar_core.training.devices import host_memory, lanes_of
from ftar_core.training.gradients import GradientTaker, Mode
from ftar_core.training.plan import make_plan
from ftar_core.training.snapshots import Copier, Held
from ftar_core.training.state import look_at_state
from ftar_core.wire.ids import NO_EPOCH
from tests.gpu.figures import note

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or a torch without CUDA"),
]


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_gradients_go_to_the_host_and_back_bit_for_bit(weight: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 256)).cuda()
    x = torch.randn(64, 512, device="cuda")
    model(x).square().sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    announced: list[int] = []
    taker = GradientTaker(model, make_plan(model, 1 << 20), announced.append, lanes=lanes_of(model.parameters()))
    for _ in range(3):
        announced.clear()
        taker.begin(Mode.TAKE)
        taker.weight = weight
        model(x).square().sum().backward()
        taker.finish(tokens=64, loss=1.0)
        assert sorted(announced) == list(range(len(taker.plan.all_buckets)))
        for mine, result in zip(taker.retained, taker.reduced, strict=True):
            assert mine.is_pinned()
            result.copy_(mine)
        taker.give_back()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, expected[name] * weight), name
    taker.close()


def test_bandwidth_of_the_lane_beside_a_bare_pinned_copy() -> None:
    parts, count = 64, 1 << 21  # 512 MiB of float32, as 64 gradients
    sources = [torch.randn(count, device="cuda") for _ in range(parts)]
    lanes = lanes_of(sources)
    lane = next(iter(lanes.values()))
    target = host_memory(lanes)(parts * count, torch.float32)
    whole = torch.cat(sources)

    def through_the_lane() -> None:
        alive = [lane.fetch(target[i * count : (i + 1) * count], s, 1.0) for i, s in enumerate(sources)]
        lane.record().wait()
        assert len(alive) == parts

    def bare() -> None:
        target.copy_(whole, non_blocking=True)
        torch.cuda.synchronize()

    best = {}
    for name, run in (("lane", through_the_lane), ("bare", bare)):
        times = []
        for _ in range(8):
            target.zero_()
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
            assert torch.equal(target[-count:], sources[-1].cpu())
        best[name] = target.numel() * 4 / min(times) / 1e9
    note("lane", bytes=target.numel() * 4, **{"GB/s": best})


def test_a_state_is_copied_beside_kernels_of_the_training() -> None:
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)).cuda()
    done: list[Held] = []
    copier = Copier(done.append)
    live = look_at_state({"model": model})
    expected = [tensor.detach().cpu().clone() for tensor in live.tensors]
    copier.start(live, 1, NO_EPOCH)
    x = torch.randn(2048, 2048, device="cuda")
    for _ in range(50):
        x = model(x).detach().tanh()  # the stream that computes is busy meanwhile
    copier.settle()  # an abandoned copy is begun again below
    while not done:
        copier.start(live, 1, NO_EPOCH, patience=1.0)
        copier.settle(60.0, 60.0)
    assert all(torch.equal(a, b) for a, b in zip(done[0].state.tensors, expected, strict=True))
    assert all(tensor.is_pinned() for tensor in done[0].state.tensors)
    copier.close()
