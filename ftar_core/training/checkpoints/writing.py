"""A snapshot to disk: each rank its part, one of them the whole, and only then the name that counts.

Ranks of a replica meet in the directory of the checkpoint that is being written, not in collectives: these would run
beside the training's own, in another thread. Each writes its tensors, and what it wrote as torch's rank-local metadata;
rank 0 waits for all of that, joins it to one `.metadata`, writes the manifest, and gives the directory its name. Every
file is on disk by then (fsync), and so is the directory itself before and after the renaming.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ftar_core.errors import CheckpointError
from ftar_core.runtime.breakpoints import passes
from ftar_core.training.checkpoints import tree
from ftar_core.training.checkpoints.histories import stands
from ftar_core.training.checkpoints.layout import (
    MANIFEST,
    METADATA,
    TREE,
    Found,
    Manifest,
    complete_name,
    entry_of,
    glance,
    part_name,
    part_of,
    survey,
    sync,
)
from ftar_core.training.checkpoints.locks import Flock, alone
from ftar_core.training.checkpoints.metadata import read_metadata
from ftar_core.training.checkpoints.pieces import Piece
from ftar_core.training.restore import Shard, decode_tree
from ftar_core.training.state import EncodedState

log = logging.getLogger("ftar.checkpoint")
LOCK = "lock"
POLL_S = 0.1


@dataclass(frozen=True)
class Target:
    """Where one rank writes: `path` is its replica's directory for `step` as long as it is not complete."""

    directory: Path
    step: int
    replica: str
    incarnation: int
    rank: int
    ranks: int

    @property
    def path(self) -> Path:
        return self.directory / part_name(self.step, self.replica, self.incarnation)

    @property
    def complete(self) -> Path:
        return self.directory / complete_name(self.step)

    def rank_metadata(self, rank: int) -> Path:
        return self.path / f"__{rank}{METADATA}"


class _Planner(DefaultSavePlanner):
    """Passes a breakpoint before each tensor. Ranks above 0 write their parts of sharded tensors only: what is whole is
    the same on all of them."""

    def __init__(self, step: int, rank: int) -> None:
        super().__init__()
        self._step, self._rank = step, rank

    def create_local_plan(self) -> SavePlan:
        if self._rank:
            self.state_dict = {name: value for name, value in self.state_dict.items() if isinstance(value, Piece)}
        return super().create_local_plan()

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.tensor if isinstance(found, Piece) else super().lookup_object(index)

    def resolve_data(self, write_item: WriteItem) -> Any:
        passes("checkpoint-write", self._step)
        return super().resolve_data(write_item)


def state_of(snapshot: EncodedState, names: tree.Names) -> tree.Flat:
    """A snapshot as the format keeps it. Raises CheckpointError."""
    places = dict(zip(map(id, snapshot.tensors), snapshot.places, strict=True)) if snapshot.places else {}

    def whole(value: object) -> object:
        if isinstance(value, Shard):
            place = places.get(id(value.part))
            if place is None:
                raise CheckpointError("the snapshot does not say where a part of a sharded tensor belongs")
            return Piece(value.part, place)
        if isinstance(value, dict):
            return type(value)({key: whole(item) for key, item in value.items()})
        return type(value)(whole(item) for item in value) if isinstance(value, list | tuple) else value

    found = whole(decode_tree(snapshot))
    assert isinstance(found, dict)  # noqa: S101  # for the type checker
    return tree.flatten(tree.by_name(found, names), Piece)


def write_part(target: Target, flat: tree.Flat) -> None:
    """This rank's tensors, and what it has written, into a directory that is there. Raises OSError, CheckpointError."""
    planner = _Planner(target.step, target.rank)
    writer = FileSystemWriter(target.path, sync_files=True)
    # Without collectives the format keeps a metadata file of each rank; they are joined later.
    writer.set_up_storage_writer(target.rank == 0, rank=target.rank, use_collectives=False)
    planner.set_up_planner(flat.values, writer.storage_meta(), target.rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    (plan,), metadata = planner.create_global_plan([plan])
    if target.rank == 0:
        with (target.path / TREE).open("wb") as file:
            file.write(tree.encode(flat.tree))
            file.flush()
            os.fsync(file.fileno())
    results = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [results.value()])


def join(target: Target) -> Metadata:
    """One metadata of those of all ranks, and written. Raises CheckpointError if they leave a hole."""
    joined: dict[str, Any] = {}
    mappings: dict[str, Any] = {}
    written: list[WriteResult] = []
    for rank in range(target.ranks):
        part = read_metadata(target.rank_metadata(rank))
        mappings |= part.planner_data or {}
        written += [WriteResult(index, stored.length, stored) for index, stored in (part.storage_data or {}).items()]
        for name, item in part.state_dict_metadata.items():
            known = joined.setdefault(name, item)
            if known is not item and isinstance(item, TensorStorageMetadata):
                known.chunks.extend(item.chunks)
    for name, item in joined.items():
        if isinstance(item, BytesStorageMetadata):
            continue
        there = sum(math.prod(chunk.sizes) for chunk in item.chunks)
        if there != math.prod(item.size):
            raise CheckpointError(f"tensor {name}: its parts add up to {there} of {math.prod(item.size)} elements")
    metadata = Metadata(joined, planner_data=mappings)
    FileSystemWriter(target.path, sync_files=True).finish(metadata, [written])
    for rank in range(target.ranks):
        target.rank_metadata(rank).unlink()
    return metadata


def publish(target: Target, lock: Flock, manifest: Callable[[dict[str, Any]], Manifest]) -> Manifest:
    """All parts are there and joined: digests, the manifest, and the name. `manifest` makes one of the files' entries.
    Raises OSError."""
    lock.close()
    (target.path / LOCK).unlink()
    files = {name: entry_of(target.path / name) for name in sorted(os.listdir(target.path))}
    made = manifest(files)
    import msgspec

    with (target.path / MANIFEST).open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(made), indent=1))
        file.flush()
        os.fsync(file.fileno())
    sync(target.path)
    passes("checkpoint-manifest", target.step)
    there = found_at(target)
    if stands(there, made.history):  # somebody took over from us although we were only slow: one of the two is enough
        shutil.rmtree(target.path)
        return made
    if there is not None:
        _put_away(target.directory, target.step)
    os.rename(target.path, target.complete)
    sync(target.directory)
    passes("checkpoint-published", target.step)
    return made


@contextlib.contextmanager
def begun(target: Target) -> Iterator[Flock]:
    """A directory for the checkpoint, locked while it is written; removed if it is not completed, whyever. Raises
    OSError."""
    shutil.rmtree(target.path, ignore_errors=True)  # of an earlier try of this very process
    target.path.mkdir()
    lock: Flock | None = None
    try:
        lock = alone(target.path / LOCK)
        if lock is None:
            raise CheckpointError(f"{target.path} is being written by another process")
        yield lock
    except BaseException:
        shutil.rmtree(target.path, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            lock.close()


def wait_for_ranks(target: Target, patience_s: float, stop: Callable[[], bool]) -> None:
    """All ranks have written their parts. Raises CheckpointError when nothing has been written for `patience_s`."""
    missing = list(range(target.ranks))
    seen, since = progress_of(target.path), time.monotonic()
    while missing := [rank for rank in missing if not target.rank_metadata(rank).exists()]:
        now, found = time.monotonic(), progress_of(target.path)
        if found != seen:
            seen, since = found, now
        if stop():
            raise CheckpointError("a newer one is due, or this process ends, before all ranks have written")
        if now - since > patience_s:
            names = ", ".join(map(str, missing[:8]))
            raise CheckpointError(f"rank {names} of {target.replica} has written nothing for {patience_s:g} s")
        time.sleep(POLL_S)


def progress_of(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Differs when something was written below it. (No clock is looked at: times are compared with themselves only.)"""
    found = []
    try:
        for entry in os.scandir(path):
            stat = entry.stat()
            found.append((entry.name, stat.st_size, stat.st_mtime_ns))
    except OSError:
        return ()
    return tuple(sorted(found))


def found_at(target: Target) -> Found | None:
    """What has the name of that step, if anything has."""
    return glance(target.complete, target.step) if target.complete.exists() else None


def _put_away(directory: Path, step: int) -> None:
    """A complete one, by way of a name that nobody loads, so that a kill in the middle leaves no half of it. Raises
    OSError."""
    gone = directory / part_name(step, "old", 0)
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(directory / complete_name(step), gone)
    shutil.rmtree(gone, ignore_errors=True)


def tidy(directory: Path, keep: int) -> None:
    """Remove complete checkpoints but the newest that can be loaded, and what dead writers have left. Never raises: the
    next one tries again."""
    try:
        names = os.listdir(directory)
        found = survey(directory)
    except OSError:
        return
    good = [one for one in found if one.loadable]
    oldest = good[-keep] if len(good) > keep else None
    for one in found[: found.index(oldest)] if oldest is not None else ():
        if one.refused is None:
            with contextlib.suppress(OSError):
                _put_away(directory, one.step)
    for name in names:
        if part_of(name) is not None:
            _remove_if_dead(directory / name)


def _remove_if_dead(path: Path) -> None:
    try:
        if not path.is_dir():
            return
        fresh = not (path / LOCK).exists()
        lock = None if fresh else alone(path / LOCK)
    except OSError:
        return
    if fresh and _may_be_young(path):
        return
    if fresh or lock is not None:
        log.info("removing %s, which its writer left", path)
        shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        lock.close()


def _may_be_young(path: Path) -> bool:
    """Without a lock: about to be locked, or about to be renamed. It is dead if nothing happens in it."""
    seen = progress_of(path)
    time.sleep(1.0)
    return path.exists() and progress_of(path) != seen


def nice(value: int = 10) -> None:
    """The calling thread gives way to the training."""
    with contextlib.suppress(OSError, AttributeError):
        import threading

        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), value)


def torch_version() -> str:
    return str(torch.__version__)
