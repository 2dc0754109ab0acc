"""What a committed step changes, and what cannot be changed that way; in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ftar_core.errors import FtarError, SettingsError
from ftar_core.runtime.settings import Settings, read_settings
from ftar_core.training.plan import make_plan
from ftar_core.training.refusals import refuse
from ftar_core.training.rounds import Round
from ftar_core.training.update import Update


def update_of(models: Any, optimizers: Any, **options: Any) -> Update:
    given = dict.fromkeys(("schedulers", "scaler", "update", "skipped", "max_norm", "lr_scale"), None)
    return Update(models=models, optimizers=optimizers, **{**given, "replicas": 0, **options})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    environment = {"FTAR_COORDINATOR": "127.0.0.1:1", "FTAR_JOB": "t", "FTAR_REPLICA": "r0"}
    return read_settings({**environment, "FTAR_TOKEN_FILE": str(token)})


class Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def sharded(module: str, name: str, **attributes: Any) -> Any:
    return type(name, (), {"__module__": module, **attributes})()


def test_optimizers_that_shard_their_state_over_replicas_are_refused_with_what_to_set(settings: Settings) -> None:
    megatron = sharded(
        "megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer", data_parallel_group=Group(8)
    )
    for optimizer in (megatron, sharded("megatron.core.optimizer", "ChainedOptimizer", chained_optimizers=[megatron])):
        with pytest.raises(SettingsError, match=r"Optimizer of megatron .* over the 8 ranks") as refused:
            refuse([], [optimizer], settings)
        assert "--use-distributed-optimizer" in refused.value.hint
    with pytest.raises(SettingsError, match="DeepSpeedZeroOptimizer of deepspeed"):
        refuse([], [sharded("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")], settings)
    refuse([nn.Linear(1, 1)], [torch.optim.Adam(nn.Linear(1, 1).parameters())], settings)


def test_a_rate_by_the_share_does_not_touch_the_schedule() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    update = update_of(model, optimizer, schedulers=scheduler, lr_scale=lambda share: share, replicas=4)
    for contributors, rate in ((("a", "b"), 0.5), (("a", "b", "c", "d"), 0.5), (("a",), 0.0625)):
        model.weight.data.zero_()
        model.weight.grad, model.bias.grad = torch.ones(1, 1), torch.ones(1)
        update.run(contributors)
        assert model.weight.item() == -rate
    assert optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"max_norm": 0.0}, "max_norm=0.0"),
        ({"max_norm": 1.0, "update": lambda: None}, "max_norm is for the default update"),
        ({"lr_scale": lambda share: share}, "how many replicas are all"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], wrong: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(SettingsError, match=wrong):
        update_of(model, torch.optim.SGD(model.parameters(), lr=1.0), **options)
    with pytest.raises(SettingsError, match="is no optimizer"):
        update_of(model, 3)
    with pytest.raises(SettingsError, match="head: a Linear"):
        update_of(model, {"head": model})


def test_an_update_of_several_steps_is_their_sum_and_travels() -> None:
    running, copy = Round(), Round()
    reduced = [torch.ones(3), torch.tensor([2.0, 0.0, 0.0, 0.0], dtype=torch.float64)]
    assert not running.take(reduced)
    running.add(reduced)
    copy.load_state_dict(running.state_dict())
    for one in (running, copy):
        one.add(reduced)
        into = [torch.empty(3), torch.empty(4, dtype=torch.float64)]
        assert one.take(into)
        assert (into[0].tolist(), into[1][0].item()) == ([2.0] * 3, 4.0)
        assert not one.take(into)
    with pytest.raises(FtarError, match="not a list of tensors"):
        running.load_state_dict({"sums": 3})


def test_the_type_of_the_reduction_is_part_of_the_plan() -> None:
    model = nn.Linear(4, 4)
    plans = [make_plan(model, 4096, dtype) for dtype in (None, torch.bfloat16, torch.float32)]
    assert plans[0].hash == plans[2].hash != plans[1].hash
    assert plans[1].buckets[0].nbytes == plans[0].buckets[0].nbytes // 2
    with pytest.raises(FtarError, match=r"reduce_dtype=torch\.int8"):
        make_plan(model, 4096, torch.int8)
