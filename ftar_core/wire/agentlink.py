"""What a rank tells the agent of its node, over the agent's Unix stream socket (`FTAR_AGENT`).

Frames as in codec.py. The rank sends RankRegister once, then a RankReport whenever something changed and at least every
second. Nothing in ftar_core depends on an answer; an agent that is not there, or goes away, costs nothing but the view.
"""

from __future__ import annotations

import msgspec

from ftar_core.wire.messages import Message
from ftar_core.wire.part import Part

MEMORY_FILE = "ftar-stacks"  # memfd_create(2)


class StackWay(Part, frozen=True):
    """How a process writes down its Python stacks: on this signal, sent to this thread, into this descriptor of its
    own, a file in memory named MEMORY_FILE, which whoever asks empties first."""

    signal: int
    thread: int
    file: int


class RankRegister(Message, frozen=True):
    job: str
    replica: str
    rank: int
    pid: int
    rails: tuple[str, ...]
    stacks: StackWay | None = None
    breakpoints: bool = False  # it takes ArmBreakpoints


class LinkReport(Part, frozen=True):
    """One rail of one link of the ring, as the native core sees it."""

    peer: str
    rail: str
    direction: str  # out | in
    state: str  # UP | DOWN | PROBING | HOLD | CLOSED
    active: bool  # carries the data now
    reason: str
    since_s: float
    flaps: int
    resumes: int
    bytes: int


class RankReport(Message, frozen=True):
    state: str  # a replica state of section 9
    step: int
    term: int
    epoch: int
    contributors: tuple[str, ...]
    links: tuple[LinkReport, ...]
    last_stall_ms: float = 0.0
    tokens_per_s: float = 0.0
    loss: float | None = None
    compute_ms: float | None = None  # a step, to the last gradient: the median of the last 20
    wait_ms: float | None = None  # a step, from there to the commit: the same
    orders: int = 0  # taken from the agent so far
    armed: int = 0  # breakpoints of them that wait for their moment


class ArmBreakpoints(Message, frozen=True):
    """From the agent, the one thing that it may send: fail there, as FTAR_BREAKPOINTS would say it. Heard only by a
    rank that was started with that variable (`allow` is enough). It forgets them after `for_ms` (0: never).

    `clear`: first forget those that an agent has asked for earlier."""

    text: str
    for_ms: int = 0
    clear: bool = False


ToRank = ArmBreakpoints
to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
FromRank = RankRegister | RankReport
from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
