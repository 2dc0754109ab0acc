"""State as bytes: exact, without pickle, refused by name where it does not fit."""

import math
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ftar_core.errors import StateMismatch
from ftar_core.training.restore import decode_tree, load_state
from ftar_core.training.state import (
    EncodedState,
    Stateful,
    TensorInfo,
    check_transferable,
    parameters_digest,
    raw_bytes,
    state_digest,
)

from .sources import encode_state


class Bag:
    """Registered state of a user's own."""

    def __init__(self, **values: object) -> None:
        self.values = dict(values)

    def state_dict(self) -> dict[str, object]:
        return dict(self.values)

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        self.values = dict(state_dict)


def trained(
    optimizer_type: type[torch.optim.Optimizer], seed: int, steps: int, **options: object
) -> dict[str, Stateful]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = optimizer_type(model.parameters(), lr=0.01, **options)  # type: ignore[call-arg]
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4])
    for _ in range(steps):
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@pytest.mark.parametrize(
    ("optimizer_type", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True}),
    ],
)
def test_a_restored_replica_continues_bit_for_bit(
    optimizer_type: type[torch.optim.Optimizer], options: dict[str, object]
) -> None:
    source = trained(optimizer_type, 1, 3, **options)
    target = trained(optimizer_type, 2, 0, **options)
    load_state(target, encode_state(source))
    for step in range(4):
        for parts in (source, target):
            model, optimizer, scheduler = parts["model"], parts["optimizer"], parts["scheduler"]
            torch.manual_seed(step)
            model(torch.randn(3, 4)).square().sum().backward()  # type: ignore[operator]
            optimizer.step()  # type: ignore[attr-defined]
            scheduler.step()  # type: ignore[attr-defined]
            optimizer.zero_grad()  # type: ignore[attr-defined]
    assert parameters_digest(source["model"]) == parameters_digest(target["model"])  # type: ignore[arg-type]
    assert state_digest(source["optimizer"]) == state_digest(target["optimizer"])


def test_float32_moments_of_bfloat16_parameters_keep_their_bits() -> None:
    def parts() -> dict[str, Stateful]:
        model = nn.Linear(3, 3, dtype=torch.bfloat16)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    source, target = parts(), parts()
    parameter = next(iter(source["model"].parameters()))  # type: ignore[attr-defined]
    moment = torch.randn(3, 3)
    source["optimizer"].state[parameter]["moment"] = moment  # type: ignore[attr-defined]
    load_state(target, encode_state(source))
    restored = target["optimizer"].state[next(iter(target["model"].parameters()))]["moment"]  # type: ignore[attr-defined]
    assert restored.dtype is torch.float32
    assert torch.equal(restored, moment)


def test_every_kind_of_value_survives() -> None:
    values: dict[str, object] = {
        "none": None,
        "inf": math.inf,
        "tiny": 5e-324,
        "big": 2**60,
        "yes": True,
        "nested": {1: [1, (2, "x")], "s": {3}},
        "count": Counter({5: 2}),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(2, 3).to(torch.bfloat16),
        "complex": torch.randn(2, dtype=torch.complex64),
        "raw": b"\x00\xff",
    }
    tree = decode_tree(encode_state({"bag": Bag(**values)}))["bag"]
    assert isinstance(tree, dict)
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            assert tree[key].dtype is value.dtype
            assert torch.equal(tree[key], value)
        else:
            assert tree[key] == value
            assert type(tree[key]) is type(value)


def test_a_snapshot_is_a_copy() -> None:
    parts = trained(torch.optim.Adam, 1, 1)
    state = encode_state(parts)
    before = [bytes(raw_bytes(t)) for t in state.tensors]
    with torch.no_grad():
        for parameter in parts["model"].parameters():  # type: ignore[attr-defined]
            parameter.zero_()
    assert [bytes(raw_bytes(t)) for t in state.tensors] == before


def test_the_first_tensor_of_another_model_is_named_and_nothing_is_changed() -> None:
    mine = trained(torch.optim.Adam, 1, 1)
    before = parameters_digest(mine["model"])  # type: ignore[arg-type]
    other_model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    other_optimizer = torch.optim.Adam(other_model.parameters())
    other_scheduler = torch.optim.lr_scheduler.MultiStepLR(other_optimizer, milestones=[2])
    state = encode_state({"model": other_model, "optimizer": other_optimizer, "scheduler": other_scheduler})
    with pytest.raises(StateMismatch, match=r"tensor 2\.weight: torch\.float32 \(2, 8\) here, torch\.float32 \(3, 8\)"):
        load_state(mine, state)
    assert parameters_digest(mine["model"]) == before  # type: ignore[arg-type]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_of_a_sharded_tensor_the_part_travels_and_becomes_one_of_the_own_mesh_again(mesh: DeviceMesh) -> None:
    def made(seed: int, steps: int) -> dict[str, Stateful]:
        torch.manual_seed(seed)
        model = fully_shard(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"model": model, "optimizer": optimizer}

    source, target = made(1, steps=3), made(2, steps=0)
    encoded = encode_state(source)
    assert encoded.infos[0].name == "model.0.weight"
    load_state(target, encoded)
    assert [state_digest(target[name]) for name in target] == [state_digest(source[name]) for name in source]
    moment = target["optimizer"].state_dict()["state"][0]["exp_avg"]  # type: ignore[index]
    assert isinstance(moment, DTensor)
    plain = {"model": nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))}
    with pytest.raises(StateMismatch, match=r"tensor model\.0\.weight: a part of a sharded tensor"):
        load_state(plain, encode_state({"model": source["model"]}))
    wider = {"model": fully_shard(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)), mesh=mesh)}
    with pytest.raises(
        StateMismatch, match=r"tensor model\.0\.weight: \(5, 4\) of \(5, 4\).* here, \(3, 4\) of \(3, 4\)"
    ):
        load_state(wider, encode_state({"model": source["model"]}))


def test_what_cannot_travel_is_said_at_the_start_with_its_path() -> None:
    with pytest.raises(StateMismatch, match=r"state \.bag\.fn: a function cannot be sent"):
        check_transferable({"bag": Bag(fn=lambda: None)})


@pytest.mark.parametrize(
    "skeleton",
    [b"", b"\xc1", b"\x93" * 100, b"cos\nsystem\n(S'true'\ntR.", b"\x92\xa9TensorRef\x07", b"\x92\xa5Value\x01"],
)
def test_junk_is_a_mismatch_and_never_runs(skeleton: bytes) -> None:
    with pytest.raises(StateMismatch):
        decode_tree(EncodedState(skeleton, (), ()))


def test_a_tensor_description_is_checked() -> None:
    assert TensorInfo("x", "float32", (2, 3)).nbytes == 24
    for info in (TensorInfo("x", "float33", (1,)), TensorInfo("x", "float32", (-1,))):
        with pytest.raises(StateMismatch, match="tensor x"):
            _ = info.nbytes
