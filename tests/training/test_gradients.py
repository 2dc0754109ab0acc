"""Taking gradients: equal to autograd's own, kept for a retry, refused where a step would be wrong silently."""

import pytest
import torch
from torch import nn

from ftar_core.errors import FtarError
from ftar_core.training.gradients import GradientTaker, Mode
from ftar_core.training.plan import make_plan


class TwoHeads(nn.Module):
    """The second head may stay unused in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.first = nn.Linear(6, 3)
        self.second = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, *, second: bool = False) -> torch.Tensor:
        x = torch.tanh(self.body(x))
        out: torch.Tensor = (self.second if second else self.first)(x)
        return out.square().sum()


def make(bucket_bytes: int = 100) -> tuple[TwoHeads, GradientTaker, list[int]]:
    torch.manual_seed(0)
    model = TwoHeads()
    announced: list[int] = []
    taker = GradientTaker(model, make_plan(model, bucket_bytes), announced.append)
    return model, taker, announced


def reference(x: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = TwoHeads()
    model(x).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def pretend_reduced(taker: GradientTaker, members: int = 1) -> None:
    for mine, result in zip(taker.retained, taker.reduced, strict=True):
        result.copy_(mine * members)


def test_gradients_come_back_equal_and_unused_parameters_are_zero() -> None:
    model, taker, announced = make()
    x = torch.randn(5, 4)
    taker.begin(Mode.TAKE)
    model(x).backward()
    assert all(p.grad is None for p in model.parameters()), "the originals are dropped: one copy is kept, not two"
    taker.finish(tokens=5, loss=2.5)
    assert sorted(announced) == list(range(len(taker.plan.all_buckets))), "each bucket exactly once"
    pretend_reduced(taker, members=3)
    taker.average()
    taker.give_back()
    for name, expected in reference(x).items():
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        torch.testing.assert_close(gradient, expected)
    assert taker.total_weight == 3
    assert taker.total_tokens == 15
    assert taker.mean_loss == 2.5


@pytest.mark.parametrize("later", [True, False])
def test_the_norm_told_is_that_of_this_steps_own_gradient(later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftar_core.training.gradients.MEASURED_LATER_BYTES", 1 << 20 if later else 0)
    model, taker, _ = make()

    def step(weight: float) -> float:
        x = torch.randn(5, 4)
        taker.begin(Mode.TAKE)
        taker.weight = weight
        model(x).backward()
        return sum(float(gradient.square().sum()) for gradient in reference(x).values()) ** 0.5

    for weight, measured in ((1.0, False), (3.0, True)):
        step(weight)  # and begun anew
        wanted = step(weight)
        taker.finish(tokens=5, loss=None)
        if measured:
            taker.measure()
        assert taker.own_norm == pytest.approx(wanted, rel=1e-5)
        assert taker.own_norm == pytest.approx(wanted, rel=1e-5), "each bucket counts once"


def test_buckets_are_announced_while_backward_goes_on() -> None:
    model, taker, announced = make()
    taker.begin(Mode.TAKE)
    seen_at_body: list[int] = []
    model.body.weight.register_hook(lambda grad: seen_at_body.extend(announced))
    model(torch.randn(2, 4)).backward()
    assert seen_at_body, "the last layer's bucket is full before the first layer's gradient exists"


def test_weights_scale_what_is_summed() -> None:
    model, taker, _ = make()
    x = torch.randn(2, 4)
    taker.begin(Mode.TAKE)
    taker.weight = 3.0
    model(x).backward()
    taker.finish(tokens=0, loss=1.0)
    slot = taker.plan.slots["first.weight"]
    kept = taker.retained[slot.bucket][slot.offset : slot.offset + slot.count]
    torch.testing.assert_close(kept, 3 * reference(x)["first.weight"].flatten())
    assert taker.retained[-1].tolist() == [3.0, 0.0, 3.0, 3.0]


def test_a_step_without_a_batch_adds_nothing() -> None:
    _, taker, announced = make()
    for buffer in taker.retained:
        buffer.fill_(7.0)  # the step before
    taker.begin(Mode.TAKE)
    taker.finish(tokens=0, loss=None, weight=0.0)
    assert all(not buffer.any() for buffer in taker.retained)
    assert len(announced) == len(taker.plan.all_buckets)


def test_a_second_backward_is_refused_by_name() -> None:
    model, taker, _ = make()
    taker.begin(Mode.TAKE)
    model(torch.randn(2, 4)).backward()
    with pytest.raises(FtarError, match="second gradient in one step") as caught:
        model(torch.randn(2, 4)).backward()
    assert "accumulate" in caught.value.hint


def test_accumulation_reduces_the_sum_once() -> None:
    model, taker, announced = make()
    x, y = torch.randn(2, 4), torch.randn(3, 4)
    taker.begin(Mode.TAKE)
    with taker.accumulate():
        model(x).backward()
        model(y, second=True).backward()  # a head that the last backward does not touch
    assert not announced
    model(y).backward()
    taker.finish(tokens=0, loss=None)
    pretend_reduced(taker)
    taker.give_back()
    torch.manual_seed(0)
    twin = TwoHeads()
    (twin(x) + twin(y, second=True) + twin(y)).backward()
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


def test_inputs_survive_the_results_for_a_retry() -> None:
    model, taker, _ = make()
    taker.begin(Mode.TAKE)
    model(torch.randn(2, 4)).backward()
    taker.finish(tokens=1, loss=1.0)
    before = [buffer.clone() for buffer in taker.retained]
    pretend_reduced(taker, members=2)
    taker.average()
    taker.give_back()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)  # an update may clip in place
    assert all(torch.equal(a, b) for a, b in zip(before, taker.retained, strict=True))


def test_a_warm_up_leaves_no_gradient_behind() -> None:
    model, taker, announced = make()
    taker.begin(Mode.DISCARD)
    model(torch.randn(2, 4)).backward()
    model(torch.randn(2, 4)).backward()
    assert not announced
    assert all(p.grad is None for p in model.parameters())


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    taker = GradientTaker(model, make_plan(model), lambda _bucket: None)
    taker.begin(Mode.TAKE)
    with pytest.raises(FtarError, match=r"parameter 0\.weight: its gradient is sparse"):
        model(torch.tensor([1, 2])).sum().backward()


def test_after_close_the_model_is_an_ordinary_one() -> None:
    model, taker, announced = make()
    taker.begin(Mode.TAKE)
    taker.close()
    model(torch.randn(2, 4)).backward()
    assert model.body.weight.grad is not None
    assert not announced
