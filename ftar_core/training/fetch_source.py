"""One source of a fetch (fetch.py): its thread, its connection, what is asked of it and what comes.

A lost connection gives its pieces back to the book and comes back over the next rail. When no rail works, or the source
cannot give this state, it is out."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from ftar_core.errors import WireError
from ftar_core.runtime.breakpoints import passes
from ftar_core.training.dial import Refusal
from ftar_core.training.pieces import Piece, ahead
from ftar_core.training.stateconn import StateConnection
from ftar_core.training.statewire import Alive, Chunk, Cut, Lent, Offer, StateRefused, Want, Whole, WholeWanted
from ftar_core.wire.messages import MemberInfo

if TYPE_CHECKING:
    from ftar_core.training.fetch import Fetch

BACKOFF_S, BACKOFF_MAX_S = 0.05, 1.0
LOOK_S = 0.5
GIVE_UP_S = 10.0  # without a byte; less than the source keeps its copy (KEPT_S)
DAMAGED_MOST = 16  # pieces in a row: then it is not the line


class Out(Exception):
    """This source is of no use for this fetch."""


class _Anew(WireError):
    """Ask again, over a connection of its own."""


class FetchSource:
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
        except (Out, Refusal) as out:
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
                    raise Out(f"its state after step {lent.step} is laid out otherwise")
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
                raise Out(message.reason)
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
                raise Out(f"{damaged} pieces in a row came damaged")
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
