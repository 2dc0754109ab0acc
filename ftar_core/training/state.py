"""The state of a replica as bytes: a tree of plain values with the tensors taken out. No pickle, ever.

`model.state_dict()`, `optimizer.state_dict()` and the like become a *skeleton* (nested dicts, lists and scalars as
MessagePack, each tensor replaced by its number) and a list of tensors in that order. Only types named here pass, in
both directions: bytes from the network can at worst describe a wrong tree, never run anything.

Rebuilding (restore.py) is exact: keys keep their type (optimizers use integers), tuples stay tuples, floats keep every
bit, tensors their dtype.

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
from ftar_core.training.shards import Place, is_sharded, local, place_of, placement

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


@dataclass(frozen=True)
class LiveState:
    """What a state is like, and the tensors themselves: good to copy until the next update changes them."""

    skeleton: bytes
    infos: tuple[TensorInfo, ...]
    tensors: tuple[torch.Tensor, ...]
    places: tuple[Place | None, ...] = ()  # of each, where that was asked for; None: the tensor is whole here

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.infos)


class EncodedState(LiveState):
    """A copy: `tensors` are in host memory, contiguous, and nobody else's."""


class Stateful(Protocol):
    """Anything with PyTorch's state protocol: modules, optimizers, schedulers, scalers."""

    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state_dict: dict[str, object], /) -> object: ...


class _Encoder:
    def __init__(self) -> None:
        self.infos: list[TensorInfo] = []
        self.tensors: list[torch.Tensor] = []
        self.wholes: list[torch.Tensor] = []

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
        self.infos.append(TensorInfo(path, dtype, tuple(tensor.shape)))
        self.tensors.append(tensor)
        self.wholes.append(whole)
        index = len(self.tensors) - 1
        if is_sharded(whole):
            return ShardRef(index, tuple(whole.shape), placement(whole))
        return TensorRef(index)


def look_at_state(parts: Mapping[str, Stateful], *, places: bool = False) -> LiveState:
    """The state of all parts without a copy of its tensors. Cost: their `state_dict()`. `places`: with the place of
    each rank's part. Raises StateMismatch for a value that cannot travel, with its path."""
    encoder = _Encoder()
    root = encoder.encode({name: part.state_dict() for name, part in parts.items()}, "")
    where = tuple(place_of(whole) for whole in encoder.wholes) if places else ()
    return LiveState(_encoder.encode(root), _named(encoder.infos), tuple(encoder.tensors), where)


def _named(infos: list[TensorInfo]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(info.name.lstrip("."), info.dtype, info.shape) for info in infos)


def check_transferable(parts: Mapping[str, Stateful]) -> None:
    """Raise StateMismatch now, at the start, rather than when the first replica wants to come back."""
    _Encoder().encode({name: part.state_dict() for name, part in parts.items()}, "")


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, without a copy (shape [nbytes], writable)."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def layout_hash(skeleton: bytes, infos: tuple[TensorInfo, ...]) -> bytes:
    """SHA-256: equal where a state has the same tree, plain values, names, dtypes and shapes."""
    digest = hashlib.sha256(skeleton)
    digest.update(msgspec.msgpack.encode(infos))
    return digest.digest()


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
    encoder = _Encoder()
    digest = hashlib.sha256(_encoder.encode(encoder.encode(part.state_dict(), "")))
    for tensor in encoder.tensors:
        digest.update(raw_bytes(tensor.detach().cpu().contiguous()))
    return digest.hexdigest()
