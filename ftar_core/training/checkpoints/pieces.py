"""A rank's part of a sharded tensor, as torch.distributed.checkpoint wants to see it.

The format's planners ask a tensor for its chunks (`torch.distributed._checkpointable`); a DTensor answers from its
mesh. A snapshot is no DTensor any more, it is bytes in host memory, so it answers with what was written down when it
was made. Nothing of this needs a process group: ranks write and read without a collective beside the training's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ftar_core.training.shards import Place


class Piece:
    """`tensor` is the part, in host memory; `place` where it is in the whole."""

    def __init__(self, tensor: torch.Tensor, place: Place) -> None:
        self.tensor, self.place = tensor, place

    def size(self) -> torch.Size:
        return torch.Size(self.place.whole)

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.place.offsets), sizes=self.tensor.size())

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        if not self.place.owner or self.tensor.numel() == 0:
            return []
        data = TensorWriteData(self._chunk(), TensorProperties.create_from_tensor(self.tensor), self.size())
        return [WriteItem(MetadataIndex(fqn, self.place.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if self.tensor.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.tensor
