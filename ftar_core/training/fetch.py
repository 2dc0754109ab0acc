"""A shadow fetches one state from all sources that hold a copy of it: one thread a source, one book of pieces.

All sources are asked for a copy at the same moment, before it is known of which step it will be: replicas step
together, so they copy the same one. Then `offered` says which state is meant (the source of the stream decides), and
whoever holds it gives pieces. A source that holds another is asked again; one that is past it is left out.

A lost connection gives its pieces back to the book and comes back over the next rail; the others go on meanwhile. When
no rail to a source works, it is out; when all are out, the fetch has failed and the follower starts a newer one."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from ftar_core.errors import StateMismatch, WireError
from ftar_core.runtime.breakpoints import passes
from ftar_core.runtime.rails import Rail
from ftar_core.training.dial import Identity, Refusal, dial, ways_to
from ftar_core.training.pace import Pace
from ftar_core.training.pieces import MAX_BYTES, Layout, Piece, PieceBook, ahead
from ftar_core.training.shelf import ANY_STEP
from ftar_core.training.state import MAX_TENSORS, EncodedState, TensorInfo, empty_tensor, layout_hash, raw_bytes
from ftar_core.training.stateconn import StateConnection
from ftar_core.training.statewire import (
    Alive,
    Borrow,
    Chunk,
    Cut,
    Lent,
    Offer,
    StateRefused,
    Want,
    Whole,
    WholeWanted,
)
from ftar_core.wire.messages import MemberInfo

log = logging.getLogger(__name__)
BACKOFF_S, BACKOFF_MAX_S = 0.05, 1.0
STRIPES = 4  # sources at a time: enough for any rail of ours, and every one of them makes a copy of its state
LOOK_S = 0.5
TRIES = 3  # of all rails to a source, when nobody listens there any more
GIVE_UP_S = 10.0  # without a byte; less than the source keeps its copy (KEPT_S)
DAMAGED_MOST = 16  # pieces in a row: then it is not the line


class _Out(Exception):
    """This source is of no use for this fetch."""


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
        self._units: dict[tuple[str, int], _Unit] = {}
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
                    self._units[key] = _Unit(self, source, len(self._units) if self._spread else 0)

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
            raise _Out("it has no state server")
        return dial(self._identity, ways[attempt % len(ways)], on_open)

    def tries(self, source: MemberInfo) -> int:
        return TRIES * max(1, len(ways_to(source, self._identity.rank, self._rails)))

    def borrow(self, connection: StateConnection) -> None:
        offer = self.offer
        connection.send(Borrow(plan=self._plan, step=ANY_STEP if offer is None else offer.step))


class _Anew(WireError):
    """Ask again, over a connection of its own."""


class _Unit:
    """One source: its thread, its connection."""

    def __init__(self, fetch: Fetch, source: MemberInfo, first_way: int) -> None:
        self._fetch, self._source, self._way = fetch, source, first_way
        self.name = source.replica
        self.text = ""
        self.giving = False
        self.ended = False
        self._left = False
        self._moved = False  # a piece has come over this connection
        self._connection: StateConnection | None = None
        self._rate = 0.0
        self._thread = threading.Thread(target=self._run, name=f"ftar-fetch-{self.name}", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        self._left = True
        connection = self._connection
        if connection is not None:
            connection.shutdown()

    def _over(self) -> bool:
        return self._left or self._fetch.closed or self._fetch.complete

    def _opened(self, connection: StateConnection) -> None:
        self._connection = connection
        if self._left:
            connection.shutdown()

    def _run(self) -> None:
        refused, delay_s, moved_at = 0, BACKOFF_S, time.monotonic()
        try:
            while not self._over():
                try:
                    self._once()
                    return
                except (OSError, WireError) as error:
                    self.text = f"{self.name}: {error}"
                    refused = refused + 1 if isinstance(error, ConnectionRefusedError) else 0
                finally:
                    self.giving = False
                    self._fetch.lost(self.name)
                if self._moved:
                    delay_s, moved_at, self._moved = BACKOFF_S, time.monotonic(), False
                if refused >= self._fetch.tries(self._source) or time.monotonic() - moved_at > GIVE_UP_S:
                    return
                self._way += 1
                with self._fetch.changed:
                    self._fetch.changed.wait_for(self._over, delay_s)
                delay_s = min(delay_s * 2, BACKOFF_MAX_S)
        except (_Out, Refusal) as out:
            self.text = f"{self.name}: {out}"
        finally:
            self.ended = True
            self._fetch.unit_ended()

    def _once(self) -> None:
        connection = self._fetch.dial(self._source, self._way, self._opened)
        try:
            self._borrow(connection)
        finally:
            self._connection = None
            connection.close()

    def _borrow(self, connection: StateConnection) -> None:
        fetch = self._fetch
        while not self._over():
            fetch.borrow(connection)
            lent = self._lent(connection, asked_for_any=fetch.offer is None)
            offer = self._offer(connection)
            if offer is None:
                return
            if lent.step == offer.step:
                if lent.layout != fetch.layout:
                    raise _Out(f"its state after step {lent.step} is laid out otherwise")
                self._pull(connection)
                return
            # Another step was copied there first: ask for the right one, which it has, or says that it has not.

    def _offer(self, connection: StateConnection) -> Offer | None:
        fetch = self._fetch
        while not self._over():
            with fetch.changed:
                fetch.changed.wait_for(lambda: fetch.offer is not None or self._over(), LOOK_S)
                if fetch.offer is not None:
                    return fetch.offer
            connection.send(Alive())
        return None

    def _lent(self, connection: StateConnection, *, asked_for_any: bool) -> Lent:
        while True:
            message = connection.receive()
            if isinstance(message, Alive):
                if asked_for_any and self._fetch.offer is not None:
                    raise _Anew("the state is known by now: this source must not copy another one")
                if message.text and self.text != message.text:
                    self.text = message.text
                    self._fetch.said()
            elif isinstance(message, Cut):
                raise _Out(message.reason)
            elif isinstance(message, StateRefused):
                raise Refusal(message.reason)
            elif isinstance(message, Lent):
                return message
            else:
                raise WireError(f"a {type(message).__name__} is not expected here")

    def _pull(self, connection: StateConnection) -> None:
        fetch = self._fetch
        asked: deque[Piece] = deque()
        began, got, damaged = time.monotonic(), 0, 0
        self.text, self.giving = "", True
        while not self._over():
            while len(asked) < ahead(self._rate):
                piece = fetch.take(self.name)
                if piece is None:
                    break
                asked.append(piece)
                self._wait(connection, fetch.pace(piece.end - piece.start))
                connection.send(Want(piece=piece.number))
            if not asked:
                if self._finished(connection):
                    return
                continue
            message = connection.receive()
            if isinstance(message, Alive):
                continue
            if not isinstance(message, Chunk) or message.index != asked[0].number:
                raise WireError(f"piece {asked[0].number} is expected")
            piece = asked.popleft()
            good = connection.receive_bytes(message, fetch.buffers(piece))
            fetch.arrived(piece, self.name, message, good)
            self._moved = self._moved or good
            passes("fetch", fetch.step)
            damaged = 0 if good else damaged + 1
            if damaged >= DAMAGED_MOST:
                raise _Out(f"{damaged} pieces in a row came damaged")
            got += piece.end - piece.start
            self._rate = got / max(time.monotonic() - began, 1e-6)
            if time.monotonic() - began > LOOK_S * 2:
                began, got = time.monotonic(), 0
                fetch.said()

    def _wait(self, connection: StateConnection, wait_s: float) -> None:
        """The shadow's own limit."""
        until = time.monotonic() + wait_s
        while (left_s := until - time.monotonic()) > 0 and not self._over():
            time.sleep(min(left_s, LOOK_S))

    def _finished(self, connection: StateConnection) -> bool:
        """Nothing is left to ask for. True when all pieces are here and this source has confirmed them."""
        fetch = self._fetch
        with fetch.changed:
            if fetch.book is not None and not fetch.book.complete:
                fetch.changed.wait(LOOK_S)  # the others are at it; something may come back
            complete = fetch.book is not None and fetch.book.complete
        if not complete:
            connection.send(Alive())
            return False
        connection.send(WholeWanted())
        while True:
            message = connection.receive()
            if isinstance(message, Whole):
                fetch.confirmed(self.name, message.digest)
                return True
            if not isinstance(message, Alive):
                raise WireError(f"a {type(message).__name__} is not expected here")


def _memory(info: TensorInfo) -> torch.Tensor:
    if info.nbytes > MAX_BYTES:
        raise WireError(f"tensor {info.name} of {info.nbytes} bytes")
    return empty_tensor(info)
