"""A state as torch.distributed.checkpoint keeps it, and back.

The format's names are paths: `model.blocks.0.weight`, `optimizer.state.blocks.0.weight.exp_avg`. An optimizer's
state_dict() numbers its parameters; here they have their names, as `torch.distributed.checkpoint.state_dict` writes
them, so that a plain torch script, and a model sharded otherwise, find what belongs to a parameter.

Plain values are in the format twice: pickled, as it has it, for such scripts; and in one file of ours, from which a
restore takes them, exact in type (a tuple stays one, a key a number) and without unpickling anything.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from ftar_core.errors import CheckpointError, StateMismatch
from ftar_core.training.restore import build
from ftar_core.training.state import AnyNode, Raw, Table, TensorRef, Value
from ftar_core.training.state import Sequence as SequenceNode

Names = Mapping[str, Sequence[str]]  # of an optimizer's parameters, by its part's name


class Tree(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`root` refers to a tensor by its place in `names`."""

    names: tuple[str, ...]
    root: AnyNode


@dataclass
class Flat:
    """`values` is what torch is given: nested dicts, tensors by name. `tensors` by the same names."""

    tree: Tree
    values: dict[str, object]
    tensors: dict[str, object]


def flatten(state: Mapping[str, object], leaf: type) -> Flat:
    """`state`: parts by name, nested. `leaf`: what is a tensor beside torch's own. Raises CheckpointError where two
    values have one name."""
    walk = _Walk(leaf)
    root, values = walk.node(dict(state), ())
    assert isinstance(values, dict)  # noqa: S101  # for the type checker
    return Flat(Tree(tuple(walk.tensors), root), values, walk.tensors)


@dataclass
class _Walk:
    leaf: type
    tensors: dict[str, object] = field(default_factory=dict)

    def node(self, value: object, path: tuple[str, ...]) -> tuple[AnyNode, object]:
        """(for our file, for torch)"""
        if isinstance(value, torch.Tensor | self.leaf):
            name = ".".join(path)
            if name in self.tensors:
                raise CheckpointError(f"two tensors of the state are named {name}", hint="rename one of them")
            self.tensors[name] = value
            return TensorRef(len(self.tensors) - 1), value
        if isinstance(value, bytes):
            return Raw(value), value
        if value is None or isinstance(value, bool | int | float | str):
            return Value(value), value
        if isinstance(value, Mapping):
            pairs = {key: self.node(item, (*path, str(key))) for key, item in value.items()}
            kind = "counter" if isinstance(value, Counter) else "dict"
            table = Table(kind, tuple(pairs), tuple(node for node, _ in pairs.values()))
            return table, {str(key): item for key, (_, item) in pairs.items()}
        for kind, types in (("list", list), ("tuple", tuple), ("deque", deque), ("set", set | frozenset)):
            if isinstance(value, types):
                before = len(self.tensors)
                found = [self.node(item, (*path, str(number))) for number, item in enumerate(value)]
                items: object = value
                if len(self.tensors) > before:  # torch would not look for ours in a list
                    items = {str(number): item for number, (_, item) in enumerate(found)}
                return SequenceNode(kind, tuple(node for node, _ in found)), items
        raise CheckpointError(f"state {'.'.join(path)}: a {type(value).__name__} cannot be kept in a checkpoint")


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Tree] = msgspec.msgpack.Decoder(Tree)


def encode(tree: Tree) -> bytes:
    return _encoder.encode(tree)


def decode(text: bytes) -> Tree:
    """Raises CheckpointError."""
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint's tree is not one of ours: {error}") from None


def unflatten(tree: Tree, tensors: Mapping[str, object]) -> dict[str, object]:
    """Raises CheckpointError."""
    try:
        state = build(tree.root, tuple(tensors[name] for name in tree.names))
    except (StateMismatch, KeyError) as error:
        raise CheckpointError(f"the checkpoint's tree is not one of ours: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError("the checkpoint's tree is not one of ours: a table is expected")
    return state


# --- optimizers ----------------------------------------------------------------------------------------------------


def by_name(state: Mapping[str, object], names: Names) -> dict[str, object]:
    """With the parameters' names where optimizers have numbers."""
    found = dict(state)
    for part, known in names.items():
        found[part] = _renamed(found[part], dict(enumerate(known)))
    return found


def by_number(state: Mapping[str, object], names: Names) -> dict[str, object]:
    """The inverse. Raises StateMismatch for a parameter that is not there."""
    found = dict(state)
    for part, known in names.items():
        if part in found:
            found[part] = _renamed(found[part], {name: number for number, name in enumerate(known)})
    return found


def _renamed(optimizer: object, to: Mapping[object, object]) -> object:
    if not isinstance(optimizer, Mapping):
        return optimizer
    found = dict(optimizer)
    states, groups = found.get("state"), found.get("param_groups")
    if isinstance(states, Mapping):
        found["state"] = {_one(to, key): value for key, value in states.items()}
    if isinstance(groups, list):
        found["param_groups"] = [
            {**group, "params": [_one(to, key) for key in group.get("params", ())]} for group in groups
        ]
    return found


def _one(to: Mapping[object, object], key: object) -> object:
    if key not in to:
        raise StateMismatch(f"parameter {key}: in the checkpoint's optimizer, not in this one")
    return to[key]
