"""A fetched state back into live parts: checked against this replica's own before anything is overwritten, so that a
state of another model is refused with the name of the first tensor that differs, and the model is left as it was."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from ftar_core.errors import StateMismatch
from ftar_core.training.shards import around, is_sharded, local, placement
from ftar_core.training.state import (
    MAX_DEPTH,
    AnyNode,
    EncodedState,
    Raw,
    ShardRef,
    Stateful,
    Table,
    TensorRef,
    Value,
)

_decoder: msgspec.msgpack.Decoder[AnyNode] = msgspec.msgpack.Decoder(AnyNode)


@dataclass(frozen=True)
class Shard:
    """A fetched part that has not been put into a tensor of this replica's mesh yet."""

    part: torch.Tensor
    whole: tuple[int, ...]
    placement: str


def decode_tree(state: EncodedState) -> dict[str, object]:
    """The tree of an encoded state, tensors in place. Raises StateMismatch if it is not a tree of ours."""
    try:
        root = _decoder.decode(state.skeleton)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise StateMismatch(f"the fetched state is not a state of ours: {error}") from None
    tree = build(root, state.tensors)
    if not isinstance(tree, dict):
        raise StateMismatch("the fetched state is not a state of ours: a table is expected")
    return tree


def build(node: AnyNode, tensors: Sequence[object]) -> object:
    """The tree below `node`, tensors in place. Raises StateMismatch."""
    return _decode(node, tensors, 0)


def _decode(node: AnyNode, tensors: Sequence[object], depth: int) -> object:
    if depth > MAX_DEPTH:
        raise StateMismatch(f"the fetched state is nested more than {MAX_DEPTH} deep")
    if isinstance(node, Value | Raw):
        return node.value
    if isinstance(node, TensorRef):
        if not 0 <= node.index < len(tensors):
            raise StateMismatch(f"the fetched state names tensor {node.index} of {len(tensors)}")
        return tensors[node.index]
    if isinstance(node, ShardRef):
        if not 0 <= node.index < len(tensors):
            raise StateMismatch(f"the fetched state names tensor {node.index} of {len(tensors)}")
        part = tensors[node.index]
        assert isinstance(part, torch.Tensor)  # noqa: S101  # for the type checker
        return Shard(part, node.whole, node.placement)
    items = [_decode(item, tensors, depth + 1) for item in node.items]
    if isinstance(node, Table):
        if len(node.keys) != len(items):
            raise StateMismatch("the fetched state has a table with keys and values of different number")
        table = dict(zip(node.keys, items, strict=True))
        return Counter(table) if node.kind == "counter" else table
    makers = {"list": list, "tuple": tuple, "deque": deque, "set": set}
    if node.kind not in makers:
        raise StateMismatch(f"the fetched state has a {node.kind!r}, which is not a type of ours")
    return makers[node.kind](items)


def load_state(parts: Mapping[str, Stateful], state: EncodedState) -> None:
    """Put a fetched state into the live parts. Raises StateMismatch, naming the first tensor that differs, before
    anything was changed."""
    load_tree(parts, decode_tree(state))


def load_tree(parts: Mapping[str, Stateful], tree: Mapping[str, object]) -> None:
    """The same with a tree of plain values, tensors and Shards."""
    if set(tree) != set(parts):
        raise StateMismatch(f"the fetched state is of {sorted(tree)}, this replica has {sorted(parts)}")
    tree = {name: _assemble(part, tree[name], name) for name, part in parts.items()}
    _check_model(parts["model"].state_dict(), tree["model"])
    for name, part in parts.items():
        values = tree[name]
        if not isinstance(values, dict):
            raise StateMismatch(f"the fetched state of {name} is not a table")
        try:
            part.load_state_dict(values)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise StateMismatch(f"the fetched state of {name} does not fit: {error}") from None
        if isinstance(part, torch.optim.Optimizer):
            _keep_dtypes(part, values)


def _assemble(part: Stateful, fetched: object, name: str) -> object:
    """Fetched shards as tensors of this replica's mesh. What a shard belongs to is known from this rank's own state at
    the same place, or, in an optimizer that has none yet, from the parameter."""
    owners: dict[int, torch.Tensor] = {}
    if isinstance(part, torch.optim.Optimizer):
        owners = dict(enumerate(p for group in part.param_groups for p in group["params"]))
    return _put_in(fetched, part.state_dict(), name, owners)


def _put_in(value: object, mine: object, path: str, owners: Mapping[int, torch.Tensor]) -> object:
    if isinstance(value, Shard):
        if not isinstance(mine, torch.Tensor) or not is_sharded(mine):
            raise StateMismatch(
                f"tensor {path}: a part of a sharded tensor, which this replica does not have", hint=_HINT
            )
        here = (tuple(mine.shape), placement(mine), tuple(local(mine).shape))
        there = (value.whole, value.placement, tuple(value.part.shape))
        if here != there:
            text = [f"{part} of {whole}, {spread}" for whole, spread, part in (here, there)]
            raise StateMismatch(f"tensor {path}: {text[0]} here, {text[1]} in the fetched state", hint=_HINT)
        return around(value.part.to(local(mine).device), mine)
    if isinstance(value, dict):
        table = {
            key: _put_in(item, _below(mine, key, path, owners), f"{path}.{key}", owners) for key, item in value.items()
        }
        return Counter(table) if isinstance(value, Counter) else table
    if isinstance(value, list | tuple | deque):
        mates = (
            list(mine) if isinstance(mine, list | tuple | deque) and len(mine) == len(value) else [None] * len(value)
        )
        items = [
            _put_in(item, mate, f"{path}[{n}]", owners) for n, (item, mate) in enumerate(zip(value, mates, strict=True))
        ]
        return type(value)(items)
    return value


def _below(mine: object, key: object, path: str, owners: Mapping[int, torch.Tensor]) -> object:
    if isinstance(mine, Mapping) and key in mine:
        return mine[key]
    # optimizer.state.<number of the parameter>.<name>: not there before the first step
    head, _, number = path.rpartition(".")
    if owners and head.endswith(".state") and number.isdigit():
        return owners.get(int(number))
    return None


def _check_model(mine: Mapping[str, object], fetched: object) -> None:
    if not isinstance(fetched, dict):
        raise StateMismatch("the fetched state of the model is not a table")
    for name, tensor in mine.items():
        if name not in fetched:
            raise StateMismatch(f"tensor {name}: this model has it, the fetched state does not", hint=_HINT)
        other = fetched[name]
        if not isinstance(tensor, torch.Tensor) or not isinstance(other, torch.Tensor):
            continue  # extra state: its owner checks it
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            raise StateMismatch(
                f"tensor {name}: {tensor.dtype} {tuple(tensor.shape)} here, {other.dtype} {tuple(other.shape)} in the "
                "fetched state",
                hint=_HINT,
            )
    for name in fetched:
        if name not in mine:
            raise StateMismatch(f"tensor {name}: in the fetched state, but not in this model", hint=_HINT)


_HINT = "start this replica with the same model and options as the others"


def _keep_dtypes(optimizer: torch.optim.Optimizer, values: Mapping[str, object]) -> None:
    """`Optimizer.load_state_dict` casts state to its parameter's dtype (a float32 moment of a bfloat16 parameter would
    lose bits): put those tensors back as they came."""
    states = values.get("state")
    if not isinstance(states, dict):
        return
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entry in states.items():
        if not isinstance(index, int) or not 0 <= index < len(ordered) or not isinstance(entry, dict):
            continue
        live = optimizer.state[ordered[index]]
        for key, value in entry.items():
            now = live.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                live[key] = value.to(now.device)
