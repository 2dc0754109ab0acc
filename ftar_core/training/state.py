"""The state of a replica as bytes: a tree of plain values with the tensors taken out. No pickle, ever.

`model.state_dict()`, `optimizer.state_dict()` and the like become a *skeleton* (nested dicts, lists and scalars as
MessagePack, each tensor replaced by its number) and a list of tensors in that order. Only types named here pass, in
both directions: bytes from the network can at worst describe a wrong tree, never run anything.

Rebuilding is exact: keys keep their type (optimizers use integers), tuples stay tuples, floats keep every bit, tensors
their dtype. It is checked against this replica's own state before anything is overwritten, so that a state of another
model is refused with the name of the first tensor that differs, and the model is left as it was.

Of a sharded tensor (shards.py) this rank's part travels, with the global shape and the placement: rank i of a replica
gets its state from rank i of another, and puts it into tensors of its own mesh.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from ftar_core.errors import StateMismatch
from ftar_core.training.plan import trainable
from ftar_core.training.shards import around, is_sharded, local, placement

MAX_DEPTH = 64
MAX_TENSORS = 1_000_000

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}

Scalar = bool | int | float | str | None


class Node(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A node of a skeleton."""


class Value(Node, frozen=True):
    value: Scalar


class Raw(Node, frozen=True):
    value: bytes


class TensorRef(Node, frozen=True):
    index: int


class ShardRef(Node, frozen=True):
    """A rank's part of a tensor: its number, the global shape, and how the whole is spread (shards.placement)."""

    index: int
    whole: tuple[int, ...]
    placement: str


class Sequence(Node, frozen=True):
    """kind: list | tuple | deque | set"""

    kind: str
    items: tuple[AnyNode, ...]


class Table(Node, frozen=True):
    """kind: dict | counter. Keys are strings or integers, as they were."""

    kind: str
    keys: tuple[str | int, ...]
    items: tuple[AnyNode, ...]


AnyNode = Value | Raw | TensorRef | ShardRef | Sequence | Table


class TensorInfo(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Name (its path in the tree, for messages), dtype name of DTYPES, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Raises StateMismatch for a dtype or shape that cannot be."""
        dtype = DTYPES.get(self.dtype)
        if dtype is None or any(size < 0 for size in self.shape):
            raise StateMismatch(f"tensor {self.name}: {self.dtype} {self.shape} is not a tensor of ours")
        count = 1
        for size in self.shape:
            count *= size
        return count * dtype.itemsize


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyNode] = msgspec.msgpack.Decoder(AnyNode)


@dataclass(frozen=True)
class EncodedState:
    """`tensors` are in host memory, contiguous, and nobody else's."""

    skeleton: bytes
    infos: tuple[TensorInfo, ...]
    tensors: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.infos)


class Stateful(Protocol):
    """Anything with PyTorch's state protocol: modules, optimizers, schedulers, scalers."""

    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state_dict: dict[str, object], /) -> object: ...


class _Encoder:
    def __init__(self, copy: bool) -> None:
        self.infos: list[TensorInfo] = []
        self.tensors: list[torch.Tensor] = []
        self._copy = copy

    def encode(self, value: object, path: str, depth: int = 0) -> AnyNode:
        if depth > MAX_DEPTH:
            raise StateMismatch(f"state {path}: nested more than {MAX_DEPTH} deep")
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, bytes):
            return Raw(value)
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise StateMismatch(f"state {path}: {value} does not fit into 64 bits")
        if value is None or isinstance(value, bool | int | float | str):
            return Value(value)
        if isinstance(value, Mapping):
            keys = tuple(value)
            if not all(isinstance(key, str | int) for key in keys):
                raise StateMismatch(f"state {path}: a key that is neither a string nor an integer")
            items = tuple(self.encode(value[key], f"{path}.{key}", depth + 1) for key in keys)
            return Table("counter" if isinstance(value, Counter) else "dict", keys, items)
        for kind, types in (("list", list), ("tuple", tuple), ("deque", deque), ("set", set | frozenset)):
            if isinstance(value, types):
                found = tuple(self.encode(item, f"{path}[{n}]", depth + 1) for n, item in enumerate(value))
                return Sequence(kind, found)
        raise StateMismatch(
            f"state {path}: a {type(value).__name__} cannot be sent to another replica",
            hint="keep tensors, numbers, strings, lists and dicts in state_dict()",
        )

    def _tensor(self, whole: torch.Tensor, path: str) -> TensorRef | ShardRef:
        tensor = local(whole)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.layout is not torch.strided:
            raise StateMismatch(f"tensor {path}: {tensor.dtype} {tensor.layout} cannot be sent to another replica")
        host = tensor
        if self._copy:
            host = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        self.infos.append(TensorInfo(path, dtype, tuple(tensor.shape)))
        self.tensors.append(host)
        index = len(self.tensors) - 1
        if is_sharded(whole):
            return ShardRef(index, tuple(whole.shape), placement(whole))
        return TensorRef(index)


def encode_state(parts: Mapping[str, Stateful]) -> EncodedState:
    """Copy the state of all parts into host memory. Cost: one memory copy of it. Raises StateMismatch for a value that
    cannot travel, with its path."""
    encoder = _Encoder(copy=True)
    root = encoder.encode({name: part.state_dict() for name, part in parts.items()}, "")
    return EncodedState(_encoder.encode(root), _named(encoder.infos), tuple(encoder.tensors))


def _named(infos: list[TensorInfo]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(info.name.lstrip("."), info.dtype, info.shape) for info in infos)


def check_transferable(parts: Mapping[str, Stateful]) -> None:
    """Raise StateMismatch now, at the start, rather than when the first replica wants to come back."""
    _Encoder(copy=False).encode({name: part.state_dict() for name, part in parts.items()}, "")


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
    tree = _decode(root, state.tensors, 0)
    if not isinstance(tree, dict):
        raise StateMismatch("the fetched state is not a state of ours: a table is expected")
    return tree


def _decode(node: AnyNode, tensors: tuple[torch.Tensor, ...], depth: int) -> object:
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
        return Shard(tensors[node.index], node.whole, node.placement)
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
    tree = decode_tree(state)
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


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, without a copy (shape [nbytes], writable)."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def empty_tensor(info: TensorInfo) -> torch.Tensor:
    """Host memory for a tensor that is about to arrive."""
    return torch.empty(info.shape, dtype=DTYPES[info.dtype])


def parameters_digest(model: torch.nn.Module) -> str:
    """SHA-256 (hex) over all parameters in canonical order, names included: equal only for bit-identical models. Of a
    sharded model, over this rank's parts."""
    digest = hashlib.sha256()
    for name, parameter in trainable(model).items():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        digest.update(raw_bytes(local(parameter).cpu().contiguous()))
    return digest.hexdigest()


def state_digest(part: Stateful) -> str:
    """SHA-256 (hex) over the whole state of a part (for example the optimizer's moments)."""
    encoder = _Encoder(copy=True)
    digest = hashlib.sha256(_encoder.encode(encoder.encode(part.state_dict(), "")))
    for tensor in encoder.tensors:
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()
