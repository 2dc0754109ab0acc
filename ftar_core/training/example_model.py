"""A byte-level GPT and its data: the Python standard library's own source, which every machine has.

Pre-norm transformer as in Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3,
with 256 symbols: bytes need no tokenizer, so the example needs no download.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

BYTES = 256
MAX_DATA_BYTES = 4 * 1024 * 1024  # of 10 and more: a replica that starts again should not spend its time reading files
NOT_SOURCE = ("__pycache__", "dist-packages", "site-packages")


@dataclass(frozen=True)
class Shape:
    """Layers, attention heads, width of the residual stream, context in bytes."""

    layers: int = 4
    heads: int = 4
    width: int = 144
    context: int = 64


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_mlp = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        grown: torch.Tensor = self.down(functional.gelu(self.up(self.norm_mlp(x))))
        return x + grown


class ByteGPT(nn.Module):
    """Next-byte prediction. Input int64 [batch, context], output logits [batch, context, 256]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.symbols = nn.Embedding(BYTES, shape.width)
        self.places = nn.Parameter(torch.zeros(shape.context, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 0.02 / (2 * shape.layers) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.symbols(text) + self.places[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _source_files(root: Path) -> Iterator[Path]:
    """All .py files below `root`, in an order that depends on their names only."""
    for directory, below, files in os.walk(root):
        below[:] = sorted(name for name in below if name not in NOT_SOURCE)
        yield from (Path(directory, name) for name in sorted(files) if name.endswith(".py"))


class SourceText(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `context` + 1 bytes over the standard library's .py files, in a fixed order. `len` is their number.
    Sample i is (inputs, targets), int64 [context] each."""

    def __init__(self, context: int, root: Path | None = None, max_bytes: int = MAX_DATA_BYTES) -> None:
        root = root if root is not None else Path(sysconfig.get_path("stdlib"))
        data = bytearray()
        for path in _source_files(root):
            data += path.read_bytes()
            if len(data) >= max_bytes:
                del data[max_bytes:]
                break
        if len(data) <= context:
            raise ValueError(f"no Python source under {root}")
        self._context = context
        self._text = torch.frombuffer(data, dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self.windows(torch.tensor([index]))
        return inputs[0], targets[0]

    def windows(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets), int64 [len(indices), context]; targets are the inputs one byte later."""
        starts = indices * self._context
        places = starts[:, None] + torch.arange(self._context + 1)
        text = self._text[places].to(torch.int64)
        return text[:, :-1], text[:, 1:]
