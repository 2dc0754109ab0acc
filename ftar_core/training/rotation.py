"""Which part of the state is looked at behind which step: a pure function of the step, the same on every replica.

Parameters and what optimizers keep for them are some three times the gradients. To read all of it at every step would
cost more than the check is worth, so each step reads a slice, and `rotation` steps in a row read everything once: a bit
that flips in the state is found within one rotation.

Slices are cut by bytes, not by parameters: a model whose largest parameter is a third of it has slices as even as any
other. What an optimizer keeps for a parameter is cut at the same fractions of it, whatever its size (Adam's moments are
as large as the parameter, its step is one number, Adafactor's rows are few), so nothing has to be known about it before
it is there, and the pieces of one rotation cover each tensor exactly once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Piece:
    """Of the tensor with this index: its part from `first` to `last`, in units of its whole size `of`."""

    index: int
    first: int
    last: int
    of: int

    def cut(self, nbytes: int) -> tuple[int, int]:
        """The bytes (first, behind the last) of a tensor of `nbytes` that this piece stands for."""
        return nbytes * self.first // self.of, nbytes * self.last // self.of


class Rotation:
    """Over tensors of these sizes in bytes."""

    def __init__(self, sizes: Sequence[int], steps: int) -> None:
        self.steps = steps
        self._starts = [0, *accumulate(sizes)]

    def at(self, step: int) -> list[Piece]:
        total, turn = self._starts[-1], step % self.steps
        first, last = total * turn // self.steps, total * (turn + 1) // self.steps
        pieces: list[Piece] = []
        index = bisect_right(self._starts, first) - 1
        while first < last:
            begin, end = self._starts[index], self._starts[index + 1]
            if end > first:
                pieces.append(Piece(index, first - begin, min(last, end) - begin, end - begin))
                first = min(last, end)
            index += 1
        return pieces
