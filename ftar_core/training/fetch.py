"""A shadow fetches one state from all sources that hold a copy of it: one thread a source, one book of pieces.

All sources are asked for a copy at the same moment, before it is known of which step it will be: replicas step
together, so they copy the same one. Then `offered` says which state is meant (the source of the stream decides), and
whoever holds it gives pieces. A source that holds another is asked again; one that is past it is left out.

Sources are fetch_source.py. When all are out, the fetch has failed and the follower starts a newer one.

Fresh memory costs as much as the bytes that go into it, page by page: another thread faults it in ahead of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from ftar_core.errors import StateMismatch, WireError
from ftar_core.native import core
from ftar_core.runtime.rails import Rail
from ftar_core.training.dial import Identity, dial, ways_to
from ftar_core.training.fetch_source import FetchSource, Out
from ftar_core.training.pace import Pace
from ftar_core.training.pieces import MAX_BYTES, Layout, Piece, PieceBook
from ftar_core.training.shelf import ANY_STEP
from ftar_core.training.state import MAX_TENSORS, EncodedState, TensorInfo, empty_tensor, layout_hash, raw_bytes
from ftar_core.training.stateconn import StateConnection
from ftar_core.training.statewire import (
    Borrow,
    Chunk,
    Offer,
)
from ftar_core.wire.messages import MemberInfo

log = logging.getLogger(__name__)
READY_LEAST_BYTES, READY_SLICE_BYTES, READY_AHEAD_BYTES, READY_LOOK_S = 1 << 24, 1 << 24, 1 << 29, 0.01
STRIPES = 4  # sources at a time: enough for any rail of ours, and every one of them makes a copy of its state
TRIES = 3  # of all rails to a source, when nobody listens there any more


class Fetch:
    """`on_change` is called, in a thread of the fetch, when it is complete, has failed, or has a new text. `spread`:
    begin with different rails for different sources (rails that share the load) instead of all with the first."""

    def __init__(
        self,
        *,
        identity: Identity,
        plan: str,
        rails: Mapping[str, Rail],
        pace: Pace,
        on_change: Callable[[], None],
        spread: bool = False,
    ) -> None:
        self._identity, self._plan, self._rails, self._pace = identity, plan, rails, pace
        self._on_change, self._spread = on_change, spread
        self.changed = threading.Condition()
        self._units: dict[tuple[str, int], FetchSource] = {}
        self.began = time.monotonic()
        self.closed = False
        self.failed = ""  # why nobody is left to fetch from
        self.differ = ""  # two sources hold different bytes
        self.complete = False
        # known with the offer
        self.offer: Offer | None = None
        self.layout = b""
        self.book: PieceBook | None = None
        self.tensors: tuple[torch.Tensor, ...] = ()
        self._memories: list[memoryview] = []
        self._row = Layout(())

    # --- for the follower

    def ask(self, sources: Sequence[MemberInfo]) -> None:
        """Fetch from these, the first STRIPES of them that have not been given up, and from no others."""
        with self.changed:
            wanted = {(source.replica, source.incarnation): source for source in sources}
            for key, unit in self._units.items():
                if key not in wanted:
                    unit.leave()
            room = STRIPES - sum(not unit.ended for unit in self._units.values())
            for key, source in wanted.items():
                if key not in self._units and room > 0 and not self.complete and not self.closed:
                    room -= 1
                    self._units[key] = FetchSource(self, source, len(self._units) if self._spread else 0)

    def offered(self, offer: Offer) -> None:
        """This is the state. Raises WireError for one that cannot be."""
        if len(offer.tensors) > MAX_TENSORS:
            raise WireError(f"a state of {len(offer.tensors)} tensors")
        try:
            total = sum(info.nbytes for info in offer.tensors)
            if total > MAX_BYTES:
                raise WireError(f"a state of {total} bytes")
            tensors = tuple(_memory(info) for info in offer.tensors)
        except (StateMismatch, RuntimeError) as error:
            raise WireError(str(error)) from None
        with self.changed:
            self.offer, self.tensors = offer, tensors
            self.layout = layout_hash(offer.skeleton, offer.tensors)
            self._memories = [raw_bytes(tensor) for tensor in tensors]
            self._row = Layout([len(memory) for memory in self._memories])
            self.book = PieceBook(total)
            self.began = time.monotonic()
            self.changed.notify_all()
        if total >= READY_LEAST_BYTES:
            threading.Thread(target=self._make_ready, args=(tensors,), name="ftar-fetch-memory", daemon=True).start()

    def _make_ready(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fault the memory in, in the order in which it is asked for. Not all at once: a state that does not come must
        not have taken memory from the training."""
        done = 0
        for tensor in tensors:
            for start in range(0, tensor.nbytes, READY_SLICE_BYTES):
                while done > self.progress()[0] + READY_AHEAD_BYTES and not (self.closed or self.complete):
                    time.sleep(READY_LOOK_S)
                if self.closed or self.complete:
                    return
                size = min(READY_SLICE_BYTES, tensor.nbytes - start)
                if not core.populate(tensor.data_ptr() + start, size):
                    return  # an older kernel: each page when the first byte comes
                done += size

    def state(self) -> EncodedState:
        """When complete."""
        if self.offer is None:
            raise RuntimeError("nothing was offered")
        return EncodedState(self.offer.skeleton, self.offer.tensors, self.tensors)

    def progress(self) -> tuple[int, int]:
        """(bytes that are here, bytes of the whole)"""
        book = self.book
        return (0, 0) if book is None else (book.arrived_bytes, book.total)

    @property
    def bytes_per_s(self) -> float:
        return self.progress()[0] / max(time.monotonic() - self.began, 1e-6)

    def by_source(self) -> dict[str, int]:
        with self.changed:
            return dict(self.book.by_source) if self.book is not None else {}

    def text(self) -> str:
        offer = self.offer
        with self.changed:
            units = list(self._units.values())
        if offer is None:
            said = [unit.text for unit in units if unit.text]
            return said[0] if said else "waiting for a state"
        have, whole = self.progress()
        giving = ", ".join(sorted(unit.name for unit in units if unit.giving)) or "nobody yet"
        share = f"{100 * have // whole} %" if whole else "0 bytes"
        return f"fetching the state after step {offer.step} from {giving}: {share} of {whole / 1e6:.0f} MB"

    def close(self) -> None:
        with self.changed:
            self.closed = True
            units = list(self._units.values())
            self.changed.notify_all()
        for unit in units:
            unit.leave()

    @property
    def step(self) -> int:
        return self.offer.step if self.offer is not None else 0

    # --- for its units

    def take(self, source: str) -> Piece | None:
        with self.changed:
            return self.book.take(source) if self.book is not None else None

    def pace(self, size: int) -> float:
        with self.changed:
            return self._pace.reserve(time.monotonic(), size)

    def buffers(self, piece: Piece) -> list[memoryview]:
        return self._row.buffers(self._memories, piece.start, piece.end)

    def arrived(self, piece: Piece, source: str, chunk: Chunk, good: bool) -> None:
        with self.changed:
            if self.book is None:
                return
            if good:
                self.book.verified(piece.number, source, chunk.sum)
            else:
                self.book.spoiled(piece.number)
                log.warning("piece %d of the state from %s came damaged: asked for again", piece.number, source)
            if self.book.complete or not good:
                self.changed.notify_all()

    def lost(self, source: str) -> None:
        with self.changed:
            if self.book is not None and self.book.lost(source):
                self.changed.notify_all()

    def confirmed(self, source: str, digest: bytes) -> None:
        """A source has told the digest of its own copy."""
        with self.changed:
            if self.book is None or self.closed:
                return
            if digest != self.book.digest():
                self.differ = f"the state after step {self.offer.step if self.offer else 0} that {source} holds differs"
            else:
                self.complete = True
            self.changed.notify_all()
        self._on_change()

    def unit_ended(self) -> None:
        with self.changed:
            alive = [unit for unit in self._units.values() if not unit.ended]
            if not alive and not self.complete and not self.closed:
                reasons = "; ".join(unit.text for unit in self._units.values() if unit.text)
                self.failed = reasons or "no source is left"
            self.changed.notify_all()
        self._on_change()

    def said(self) -> None:
        self._on_change()

    def dial(self, source: MemberInfo, attempt: int, on_open: Callable[[StateConnection], None]) -> StateConnection:
        ways = ways_to(source, self._identity.rank, self._rails)
        if not ways:
            raise Out("it has no state server")
        return dial(self._identity, ways[attempt % len(ways)], on_open)

    def tries(self, source: MemberInfo) -> int:
        return TRIES * max(1, len(ways_to(source, self._identity.rank, self._rails)))

    def borrow(self, connection: StateConnection) -> None:
        offer = self.offer
        connection.send(Borrow(plan=self._plan, step=ANY_STEP if offer is None else offer.step))


def _memory(info: TensorInfo) -> torch.Tensor:
    if info.nbytes > MAX_BYTES:
        raise WireError(f"tensor {info.name} of {info.nbytes} bytes")
    return empty_tensor(info)
