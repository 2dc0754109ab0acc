"""A checkpoint back into live parts: compared with them, verified as it is read, and loaded only when all is well.

The state that is written is that of a whole replica, so it fits replicas of any number, and of any number of ranks:
each rank reads the parts of tensors that are its own (torch.distributed.checkpoint's resharding), and the digests of
the files that these are in are checked before a byte of them is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ftar_core.errors import CheckpointError, StateMismatch
from ftar_core.training.checkpoints import tree
from ftar_core.training.checkpoints.layout import METADATA, TREE, Manifest, verify
from ftar_core.training.checkpoints.metadata import Reader, read_metadata
from ftar_core.training.checkpoints.pieces import Piece
from ftar_core.training.restore import Shard, load_tree
from ftar_core.training.shards import is_sharded, local, place_of, placement
from ftar_core.training.state import Stateful


class _Planner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """torch's own replaces every value by None that is no tensor of its kinds."""
        self.state_dict, self.original_state_dict = state_dict, state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found = self.state_dict[index.fqn]
        tensor: torch.Tensor = found.tensor if isinstance(found, Piece) else super().lookup_tensor(index)
        return tensor


class Damaged(CheckpointError):
    """Its bytes are not those that were written: an older one is to be tried."""


@dataclass
class Loaded:
    """A state in host memory, verified; nothing of it is live yet."""

    step: int
    path: Path
    state: dict[str, object]

    def into(self, parts: Mapping[str, Stateful]) -> None:
        """Raises StateMismatch, and has changed nothing, if it does not fit."""
        try:
            load_tree(parts, self.state)
        except StateMismatch as error:
            text = str(error).replace("the fetched state", f"the checkpoint {self.path}")
            raise StateMismatch(text, hint=error.hint) from None


def load(path: Path, manifest: Manifest, parts: Mapping[str, Stateful], names: tree.Names) -> Loaded:
    """Raises Damaged; StateMismatch for a checkpoint of another model, which names the first difference;
    CheckpointError for what torch cannot read."""

    def check(files: list[str]) -> None:
        for name in files:
            entry = manifest.files.get(name)
            problem = verify(path, name, entry) if entry is not None else f"{name} is not in its manifest"
            if problem:
                raise Damaged(problem)

    check([METADATA, TREE])
    kept = tree.decode((path / TREE).read_bytes())
    metadata = read_metadata(path / METADATA)
    live = tree.flatten(tree.by_name({name: part.state_dict() for name, part in parts.items()}, names), Piece)
    templates = _templates(kept, metadata, live, names, path)
    values: dict[str, Any] = dict(templates)
    damage: list[Damaged] = []

    def before(files: list[str]) -> None:
        try:
            check(files)
        except Damaged as error:
            damage.append(error)
            raise

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group: none is wanted
            state_dict_loader.load(
                values,
                storage_reader=Reader(path, metadata, before),
                planner=_Planner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,
            )
    except (Exception, CheckpointException) as error:  # noqa: BLE001  # torch's own, which is no Exception, holds the cause
        if damage:
            raise damage[0] from None
        raise CheckpointError(  # its bytes are right, so falling back to an older one would only hide the reason
            f"checkpoint {path} cannot be read: {_innermost(error)}",
            hint=f"it was written with torch {manifest.torch}: use that, or move it away to use an older one",
        ) from None
    tensors = {name: _as_shard(value, live.tensors, name, names) for name, value in templates.items()}
    return Loaded(manifest.step, path, tree.by_number(tree.unflatten(kept, tensors), names))


def _templates(kept: tree.Tree, metadata: Metadata, live: tree.Flat, names: tree.Names, path: Path) -> dict[str, Any]:
    """Memory for what this rank has of each tensor."""
    of_model = {name for name in live.tensors if name.startswith("model.")}
    there = {name for name in kept.names if name.startswith("model.")}
    for name in sorted(of_model - there):
        raise StateMismatch(f"tensor {name}: this model has it, the checkpoint {path} does not", hint=_HINT)
    for name in sorted(there - of_model):
        raise StateMismatch(f"tensor {name}: in the checkpoint {path}, but not in this model", hint=_HINT)
    found: dict[str, Any] = {}
    for name in kept.names:
        item = metadata.state_dict_metadata.get(name)
        if not isinstance(item, TensorStorageMetadata):
            raise Damaged(f"tensor {name} is in its tree and not in its {METADATA}")
        mine = _alike(name, item, live.tensors, names)
        if isinstance(mine, torch.Tensor):
            here, saved = (mine.dtype, tuple(mine.shape)), (item.properties.dtype, tuple(item.size))
            if here != saved and name in of_model:
                text = f"{here[0]} {here[1]} here, {saved[0]} {saved[1]} in the checkpoint {path}"
                raise StateMismatch(f"tensor {name}: {text}", hint=_HINT)
            place = place_of(mine)
            if place is not None:
                part = torch.empty(local(mine).shape, dtype=item.properties.dtype)
                found[name] = Piece(part, place)
                continue
        found[name] = torch.empty(item.size, dtype=item.properties.dtype)
    return found


_HINT = "give this model a checkpoint directory of its own, or start with the model that wrote it"


def _alike(name: str, item: TensorStorageMetadata, live: Mapping[str, object], names: tree.Names) -> object:
    """What tells how a tensor is spread over the ranks: this rank's own of that name; in an optimizer that has none
    yet, the parameter, if what is kept has its shape."""
    if name in live:
        return live[name]
    for part, parameters in names.items():
        prefix = f"{part}.state."
        if not name.startswith(prefix):
            continue
        owner, _, _ = name.removeprefix(prefix).rpartition(".")
        parameter = live.get(f"model.{owner}") if owner in parameters else None
        if isinstance(parameter, torch.Tensor) and is_sharded(parameter) and tuple(parameter.shape) == tuple(item.size):
            return parameter
    return None


def _as_shard(value: object, live: Mapping[str, object], name: str, names: tree.Names) -> object:
    if not isinstance(value, Piece):
        return value
    mine = live.get(name)
    if not isinstance(mine, torch.Tensor):
        mine = _alike(name, _like(value), live, names)
    assert isinstance(mine, torch.Tensor)  # noqa: S101  # a Piece was made from it
    return Shard(value.tensor, tuple(mine.shape), placement(mine))


def _like(piece: Piece) -> TensorStorageMetadata:
    from torch.distributed.checkpoint.metadata import TensorProperties

    return TensorStorageMetadata(TensorProperties.create_from_tensor(piece.tensor), piece.size(), [])


def _innermost(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    if failures:
        inner = next(iter(failures.values()))
        return _innermost(inner[0] if isinstance(inner, tuple) else inner)
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
