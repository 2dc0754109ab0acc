"""Where the gradients of a step are until it is committed, so that it can be reduced again when a replica is lost.

    device      beside the parameters; on the CPU that is host memory
    host        one flat buffer a bucket in host memory, as large as the gradients, for the whole job
    recompute   nowhere: a bucket is kept until it is reduced, then its memory serves the next one. When the step must
                be reduced again the loop is given the same batch once more.

`auto` takes the first that there is memory for. The ring reduces from host memory, so gradients of another device are
in host memory in any case, and keeping them there is what `auto` and `host` do with them; unless it reduces on the
device (FTAR_REDUCE=device, memories.py): then they are kept there.

Recomputing is not for every loop. The ranks of one replica hear of a new epoch at different moments of forward and
backward, which hold collectives among them, so they cannot agree on running a batch again: with more than one rank a
replica it is refused. So is it in a loop with plain operations (`session.allreduce`), which the others would not make
twice. The batch is run again as it was dealt, but random numbers go on: the gradients may differ, which is right, since
none of the first ones are used anywhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ftar_core.errors import SettingsError
from ftar_core.native import core
from ftar_core.training.devices import unpinned
from ftar_core.training.memories import DeviceMemory, Memory
from ftar_core.training.memory import available_bytes
from ftar_core.training.plan import DTYPE_CODES, BucketPlan

log = logging.getLogger("ftar.session")
Host = Callable[[int, torch.dtype], torch.Tensor]  # zeroed host memory
MODES = ("auto", "device", "host", "recompute")


@dataclass(frozen=True)
class Retention:
    """`mode`: device, host or recompute. `fallback`: it is not the one that was asked for (or the first of `auto`)."""

    mode: str
    reason: str
    fallback: bool = False


def choose_on_device(asked: str) -> Retention:
    """Of gradients that are reduced on the device (memories.py). Pure. Raises SettingsError for what cannot be."""
    if asked not in {"auto", "device"}:
        raise SettingsError(
            f"retain={asked!r} with FTAR_REDUCE=device: gradients are reduced where they are, so they are kept there",
            hint="use retain='auto', or FTAR_REDUCE=host",
        )
    return Retention("device", "they are reduced there")


def choose(asked: str, *, nbytes: int, limit: int, available: int, on_device: bool, ranks: int) -> Retention:
    """Pure. `nbytes` of one set of gradients; `limit` on what is retained (0: none); `available` host memory once the
    results have theirs (0: not known). Raises SettingsError for what cannot be."""
    if asked not in MODES:
        raise SettingsError(f"retain={asked!r}: one of {', '.join(MODES)} is expected")
    if limit < 0:
        raise SettingsError(f"retain_bytes={limit}: a size in bytes, or 0 for no limit, is expected")
    if asked == "device" and on_device:
        raise SettingsError(
            "retain='device': gradients are reduced from host memory, so they are there in any case",
            hint="use retain='host' or 'auto'",
        )
    if asked == "recompute":
        if ranks > 1:
            raise SettingsError(
                f"retain='recompute' with {ranks} ranks a replica: they cannot agree on running a batch again",
                hint="use retain='host' or 'auto'",
            )
        return Retention("recompute", "asked for")
    first = "device" if asked in ("auto", "device") and not on_device else "host"
    problem = ""
    if limit and nbytes > limit:
        problem = f"the gradients ({nbytes} bytes) are more than retain_bytes={limit}"
    elif available and nbytes > available:
        problem = f"the gradients ({nbytes} bytes) are more than the memory that is available ({available} bytes)"
    if not problem:
        return Retention(first, f"{nbytes} bytes of gradients fit into memory")
    if ranks > 1:
        raise SettingsError(
            f"retain={asked!r}: {problem}, and {ranks} ranks a replica cannot run a batch again",
            hint="raise retain_bytes, or shard the model over more ranks",
        )
    return Retention("recompute", problem, fallback=True)


def buffers(plan: BucketPlan, host: Host, memory: Memory | None) -> list[torch.Tensor]:
    """One for each bucket, where it is reduced. Raises RuntimeError (torch's allocator)."""
    return [
        memory.zeros(bucket.count, bucket.dtype)
        if isinstance(memory, DeviceMemory) and bucket.index in memory.on_device
        else host(bucket.count, bucket.dtype)
        for bucket in plan.all_buckets
    ]


class Kept:
    """Buffers for the whole job: [bucket] is a flat tensor of its size and dtype. Raises MemoryError."""

    keeps = True
    _memory: Memory | None = None

    def __init__(self, plan: BucketPlan, host: Host = unpinned, memory: Memory | None = None) -> None:
        self._memory = memory
        try:
            self._buffers = buffers(plan, host, memory)
        except RuntimeError as error:  # torch's allocator
            raise MemoryError(str(error)) from None

    def __getitem__(self, bucket: int) -> torch.Tensor:
        return self._buffers[bucket]

    def __len__(self) -> int:
        return len(self._buffers)

    def release(self, bucket: int) -> None:
        """It is reduced: nothing to do, it may have to be reduced again."""

    def squares(self, bucket: int) -> float:
        """The sum of squares of what lies there."""
        if isinstance(self._memory, DeviceMemory) and bucket in self._memory.on_device:
            return self._memory.squares(self._buffers[bucket])
        return _squares(self._buffers[bucket])

    @property
    def most_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)


class Staged:
    """[bucket] is memory that lasts until `release`, and then serves another bucket. Any thread."""

    keeps = False

    def __init__(self, plan: BucketPlan, host: Host = unpinned) -> None:
        self._host = host
        self._plan = plan.all_buckets
        self._size = max(bucket.nbytes for bucket in self._plan)
        self._lock = threading.Lock()
        self._used: dict[int, torch.Tensor] = {}
        self._free: list[torch.Tensor] = []
        self.most_bytes = 0  # at the same time, so far

    def __getitem__(self, bucket: int) -> torch.Tensor:
        layout = self._plan[bucket]
        with self._lock:
            memory = self._used.get(bucket)
            if memory is None:
                memory = self._free.pop() if self._free else self._host(self._size, torch.uint8)
                self._used[bucket] = memory
                self.most_bytes = max(self.most_bytes, (len(self._used) + len(self._free)) * self._size)
        return memory[: layout.nbytes].view(layout.dtype)

    def __len__(self) -> int:
        return len(self._plan)

    def squares(self, bucket: int) -> float:
        return _squares(self[bucket])

    def release(self, bucket: int) -> None:
        """Nobody reads it any more. The memory stays with this process: a link may still look at it."""
        with self._lock:
            memory = self._used.pop(bucket, None)
            if memory is not None:
                self._free.append(memory)


Inputs = Kept | Staged


def _squares(flat: torch.Tensor) -> float:
    return core.squares(flat.data_ptr(), flat.numel(), DTYPE_CODES[flat.dtype])


def inputs_for(
    model: nn.Module,
    plan: BucketPlan,
    asked: str,
    limit: int,
    ranks: int,
    *,
    host: Host = unpinned,
    memory: Memory | None = None,
) -> tuple[Inputs, Retention]:
    """The buffers for one model's gradients, as `asked` or as there is memory for. Raises SettingsError."""
    if isinstance(memory, DeviceMemory):
        there = choose_on_device(asked)
        try:
            return Kept(plan, host, memory), there
        except MemoryError as error:
            raise SettingsError(
                f"FTAR_REDUCE=device: no memory on {memory.device} for the gradients ({plan.nbytes} bytes, and as much "
                f"for the results): {error}",
                hint="set FTAR_REDUCE=host, or unset it",
            ) from None
    available = available_bytes() // ranks
    if available:
        available = max(1, available - plan.nbytes)  # the results want as much
    about = {"nbytes": plan.nbytes, "available": available, "ranks": ranks}
    on_device = any(parameter.device.type != "cpu" for parameter in model.parameters())
    found = choose(asked, limit=limit, on_device=on_device, **about)
    inputs: Inputs
    try:
        inputs = Staged(plan, host) if found.mode == "recompute" else Kept(plan, host)
    except MemoryError as error:
        instead = choose(asked, limit=1, on_device=on_device, **about)  # as if none was allowed
        found = Retention(instead.mode, f"no memory for {plan.nbytes} bytes of gradients: {error}", fallback=True)
        inputs = Staged(plan, host)
    if found.fallback:
        log.warning("gradients are not retained: %s. A step that a lost replica breaks is computed again", found.reason)
    return inputs, found
