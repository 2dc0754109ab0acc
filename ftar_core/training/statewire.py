"""What a shadow and a state server say to each other, and how the bytes of tensors follow.

    server -> StateChallenge                       a stranger who cannot answer is dropped after STRANGER_S
    shadow -> StateHello (proof)
    server -> StateWelcome (proof) | StateRefused

Then a connection is one of two. The stream, from one source:

    shadow -> Subscribe                            new, or the same again over another rail, with where to go on
    server -> Offer                                what the state is like (without tensors when the shadow holds it)
    server -> StepData, chunks ...                 after each commit; the shadow answers Kept

And the fetch of the offered state, from every source that holds a copy of the same step:

    shadow -> Borrow                               asked for before the step is known, so that all copy the same
    server -> Lent                                 the step that it holds, and what the state is like there
    shadow -> Want ...                             pieces of the row of bytes (pieces.py), some asked ahead
    server -> Chunk and its bytes ...
    shadow -> WholeWanted; server -> Whole         a digest of the source's own copy

A server that has nothing to say says Alive every ALIVE_S. A chunk is a `Chunk` frame and then `size` raw bytes, with a
64-bit checksum (native `digest`, not cryptographic). Messages are bounded msgspec frames; the raw bytes are bounded by
what the Offer announced. Nothing is unpickled."""

from __future__ import annotations

import msgspec

from ftar_core.training.state import TensorInfo
from ftar_core.wire.ids import EpochId
from ftar_core.wire.messages import Deal, Message, Verdict

PURPOSE_HELLO, PURPOSE_WELCOME = "state-hello", "state-welcome"
CHUNK_BYTES = 1024 * 1024  # at most so much follows one Chunk frame
ALIVE_S = 0.5
# Six missed signs of life: a shadow may wait longer than a rail, whose death the native links notice in milliseconds,
# because nobody waits for it; and a source whose interpreter is busy is not dead.
SILENCE_S = 3.0
STRANGER_S = 3.0
KEPT_S = 15.0  # how long a source waits for Kept, and keeps a subscription whose connection was lost


class StateChallenge(Message, frozen=True):
    job: str
    nonce: bytes


class StateHello(Message, frozen=True):
    job: str
    replica: str
    incarnation: int
    nonce: bytes
    proof: bytes


class StateWelcome(Message, frozen=True):
    proof: bytes


class StateRefused(Message, frozen=True):
    reason: str


class Subscribe(Message, frozen=True):
    """`id` (16 bytes) names the subscription over all its connections. `have` is the step whose state the shadow holds,
    or is fetching (-1: none). `next_step` of the stream, to go on after a lost connection."""

    id: bytes
    plan: str
    have: int
    next_step: int = 0


class Offer(Message, frozen=True):
    """The state after `step`, committed in `epoch`. Without tensors: the shadow holds it already."""

    step: int
    epoch: EpochId
    skeleton: bytes
    tensors: tuple[TensorInfo, ...]


class Chunk(Message, frozen=True):
    """`size` raw bytes follow this frame: bytes [offset, offset + size) of bucket `index`, or of piece `index` of the
    state (offset 0)."""

    index: int
    offset: int
    size: int
    sum: int


class Borrow(Message, frozen=True):
    """Keep a copy of the state for me: after `step`, or after any (-1)."""

    plan: str
    step: int


class Lent(Message, frozen=True):
    """A copy of the state after `step`; `layout`: a hash of its skeleton and tensors. Kept until the connection ends,
    and a while longer."""

    step: int
    layout: bytes


class Want(Message, frozen=True):
    """This piece of the state that was lent. Several may be asked for ahead; they come in that order."""

    piece: int


class WholeWanted(Message, frozen=True):
    pass


class Whole(Message, frozen=True):
    digest: bytes


class StepData(Message, frozen=True):
    """A committed step. Its averaged buckets follow as chunks (none when nobody updates); `sizes` in bytes. `deal`: of
    the step behind it."""

    step: int
    epoch: EpochId
    verdict: Verdict
    contributors: tuple[str, ...]
    sizes: tuple[int, ...]
    deal: Deal | None = None


class Kept(Message, frozen=True):
    """The shadow keeps everything up to this step."""

    step: int


class Alive(Message, frozen=True):
    """Nothing to send; `text` says what the shadow waits for."""

    text: str = ""


class Cut(Message, frozen=True):
    """The subscription is over. `again`: take a newer snapshot here; else ask another source."""

    reason: str
    again: bool


StateMessage = (
    StateChallenge
    | StateHello
    | StateWelcome
    | StateRefused
    | Subscribe
    | Offer
    | Chunk
    | Borrow
    | Lent
    | Want
    | WholeWanted
    | Whole
    | StepData
    | Kept
    | Alive
    | Cut
)
state_message: msgspec.msgpack.Decoder[StateMessage] = msgspec.msgpack.Decoder(StateMessage)
