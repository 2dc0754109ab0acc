"""torch.distributed.checkpoint's metadata, which is a pickle, read without letting it run anything.

Its format is data classes of torch's own; no other name is taken from the file. (What a checkpoint holds decides what a
training is: whoever can write it needs no pickle to do harm. But a file that is damaged, or not ours, shall be an
error and nothing else.)
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from ftar_core.errors import CheckpointError

_ALLOWED = {
    ("torch", "Size"),
    ("torch", "strided"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
}
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found: Any = None
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _ALLOWED or module in _MODULES:
            found = super().find_class(module, name)
        if found is None or (module in _MODULES and not (isinstance(found, type) and not issubclass(found, type))):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        return found


def read_metadata(path: Path) -> Metadata:
    """Raises OSError, CheckpointError."""
    with path.open("rb") as file:
        try:
            found = _Unpickler(file).load()
        except Exception as error:  # noqa: BLE001  # a damaged pickle can raise anything
            raise CheckpointError(f"{path.name} is not torch.distributed.checkpoint's: {error}") from None
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path.name} is not torch.distributed.checkpoint's")
    return found


class Reader(FileSystemReader):
    """torch's, with our way to the metadata. `before(names)` is called with the files that are about to be read."""

    def __init__(self, path: Path, metadata: Metadata, before: Any) -> None:
        super().__init__(path)
        self._metadata, self._before = metadata, before

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        return self._metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        self._before(sorted({self.storage_data[item.storage_index].relative_path for item in plan.items}))
        return super().read_data(plan, planner)
