"""The bucket plan: the same on every replica of one model, and refused with a name where it cannot work."""

import pytest
import torch
from torch import nn

from ftar_core.errors import PlanMismatch
from ftar_core.training.plan import BufferWatch, make_plan, trainable, usual_bucket_bytes


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))


def test_parameters_lie_in_reverse_order_without_gaps() -> None:
    plan = make_plan(small_model())
    names = [slot.name for bucket in plan.buckets for slot in bucket.slots]
    assert names == ["2.bias", "2.weight", "1.bias", "1.weight", "0.bias", "0.weight"]
    (bucket,) = plan.buckets
    ends = [slot.offset + slot.count for slot in bucket.slots]
    assert [slot.offset for slot in bucket.slots] == [0, *ends[:-1]]
    assert bucket.count == ends[-1] == sum(p.numel() for p in small_model().parameters())
    assert plan.all_buckets[-1] is plan.tally
    assert plan.tally.dtype is torch.float64


def test_buckets_close_at_their_size_and_never_mix_dtypes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).to(torch.bfloat16), nn.Linear(8, 8), nn.Linear(8, 8))
    plan = make_plan(model, bucket_bytes=300)
    for bucket in plan.buckets:
        dtypes = {model.get_parameter(slot.name).dtype for slot in bucket.slots}
        assert dtypes == {bucket.dtype}
        assert bucket.nbytes <= 300 or len(bucket.slots) == 1
    assert sorted(plan.slots) == sorted(name for name, _ in model.named_parameters())
    assert [bucket.index for bucket in plan.all_buckets] == list(range(len(plan.all_buckets)))


def test_little_is_left_to_reduce_behind_the_backward_of_a_small_model() -> None:
    layers = [nn.Linear(256, 256, bias=False) for _ in range(16)]  # 4 MiB of gradients
    plan = make_plan(nn.Sequential(*layers))
    assert [bucket.nbytes for bucket in plan.buckets] == [1 << 20] * 4
    small, large = nn.Parameter(torch.empty(10)), nn.Parameter(torch.empty(10 << 20))
    assert usual_bucket_bytes([small]) == 256 << 10
    assert usual_bucket_bytes([large, small]) == 4 << 20
    assert usual_bucket_bytes([nn.Parameter(torch.empty(1 << 20))], torch.bfloat16) == 512 << 10


def test_hash_is_of_the_layout_not_of_the_values() -> None:
    assert make_plan(small_model()).hash == make_plan(small_model()).hash
    other_shape = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    other_dtype = small_model().to(torch.float64)
    frozen = small_model()
    frozen[0].bias.requires_grad_(False)
    renamed = nn.ModuleDict({"a": nn.Linear(3, 5), "b": nn.LayerNorm(5), "c": nn.Linear(5, 2)})
    hashes = {make_plan(m).hash for m in (small_model(), other_shape, other_dtype, frozen, renamed)}
    hashes.add(make_plan(small_model(), bucket_bytes=50).hash)
    assert len(hashes) == 6


def test_tied_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert list(trainable(model)) == ["1.bias", "0.bias", "0.weight"]


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "module 1 (BatchNorm1d)"),
        (nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64)), "parameter 0.bias"),
        (nn.ReLU(), "no trainable parameters"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(model: nn.Module, named: str) -> None:
    with pytest.raises(PlanMismatch) as caught:
        make_plan(model)
    assert named in str(caught.value)
    assert caught.value.hint


def test_batch_norm_without_running_statistics_is_fine() -> None:
    make_plan(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)))
    frozen = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    frozen[1].eval()
    make_plan(frozen)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.linear(x)
        return out


def test_a_buffer_changed_in_forward_is_noticed_in_any_module() -> None:
    model = Counting()
    watch = BufferWatch(model)
    watch.remember()
    watch.check()
    model(torch.zeros(1, 2))
    with pytest.raises(PlanMismatch, match="buffer calls"):
        watch.check()
