"""One epoch's communicator, from the meeting to the abort, as a value with a table.

    MEETING  the members learn the communicator's id from the one in the first slot, over the host's ring
    JOINING  NCCL connects them; nobody waits for a call to return
    OPEN     buckets are reduced
    ALONE    an epoch of one member has no communicator: its sums are copies
    FAILED   NCCL, or the device, cannot go on; only another epoch helps
    OVER     another epoch was ordered, or none

Moves are those of `NEXT`; another one is a fault of this program.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import torch

from ftar_core.nccllib import ID_BYTES, Communicator
from ftar_core.training.devices import Event
from ftar_core.training.nccl.order import Order

WORDS = ID_BYTES // 4


class Phase(Enum):
    MEETING = "meeting"
    JOINING = "joining"
    OPEN = "open"
    ALONE = "alone"
    FAILED = "failed"
    OVER = "over"


NEXT: dict[Phase, tuple[Phase, ...]] = {
    Phase.MEETING: (Phase.JOINING, Phase.FAILED, Phase.OVER),
    Phase.JOINING: (Phase.OPEN, Phase.FAILED, Phase.OVER),
    Phase.OPEN: (Phase.FAILED, Phase.OVER),
    Phase.ALONE: (Phase.FAILED, Phase.OVER),
    Phase.FAILED: (Phase.OVER,),
    Phase.OVER: (),
}


@dataclass
class Flight:
    """A bucket on its way. `sum` comes with the last byte of the sum on the device, or with the abort; None: there is
    nothing to add."""

    step: int
    bucket: int
    sum: Event | None


@dataclass
class Life:
    """`said`, `heard`: what goes into the meeting and what comes out of it, int32 [32]; the host's ring has their
    addresses until the next epoch is activated, and this object lives as long."""

    key: bytes
    members: int
    me: int
    order: Order
    since: float  # CLOCK_MONOTONIC; of the phase
    phase: Phase = Phase.MEETING
    reason: str = ""  # why it failed
    met: bool = False  # `heard` is complete
    told: bool = False  # the host's ring has `said`
    comm: Communicator | None = None
    begun: tuple[int, int] | None = None  # (step, bucket) that NCCL is putting on the stream
    flights: deque[Flight] = field(default_factory=deque)
    said: torch.Tensor = field(default_factory=lambda: torch.zeros(WORDS, dtype=torch.int32))
    heard: torch.Tensor = field(default_factory=lambda: torch.zeros(WORDS, dtype=torch.int32))

    def __post_init__(self) -> None:
        if self.members == 1:
            self.phase = Phase.ALONE

    def move(self, phase: Phase, now: float) -> None:
        if phase not in NEXT[self.phase]:
            raise RuntimeError(f"the communicator of an epoch cannot go from {self.phase.value} to {phase.value}")
        self.phase, self.since = phase, now

    @property
    def good(self) -> bool:
        """What its operations have left on the device is true."""
        return self.phase in (Phase.OPEN, Phase.ALONE)


def id_words(unique_id: bytes) -> torch.Tensor:
    """int32 [32]. Others add zeros, so the sum is the id on every member."""
    return torch.frombuffer(bytearray(unique_id), dtype=torch.int32)


def id_of(words: torch.Tensor) -> bytes:
    return words.view(torch.uint8).numpy().tobytes()
