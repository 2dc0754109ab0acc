"""What the threads of a state server do, one a connection: the stream of steps, or pieces of a snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ftar_core.errors import WireError
from ftar_core.runtime.breakpoints import passes
from ftar_core.training.pace import Pace
from ftar_core.training.shelf import Borrower, Shelf, StepItem, Subscription
from ftar_core.training.snapshots import Held
from ftar_core.training.stateconn import StateConnection
from ftar_core.training.statewire import (
    ALIVE_S,
    Alive,
    Borrow,
    Chunk,
    Cut,
    Kept,
    Lent,
    Subscribe,
    Want,
    Whole,
    WholeWanted,
)


class _Superseded(Exception):
    """Another connection has taken the subscription over, or the server closes."""


@dataclass
class Limits:
    """The pace that all connections of a server share."""

    pace: Pace = field(default_factory=Pace)
    stream_bytes: int = 0
    fetch_bytes: int = 0


def waits_for(shelf: Shelf) -> str:
    return shelf.copier.text or "waiting for a copy of the state, which begins at the next step boundary"


# --- the stream


class Stream:
    def __init__(self, shelf: Shelf, limits: Limits, connection: StateConnection, subscription: Subscription) -> None:
        self._shelf, self._limits, self._connection = shelf, limits, connection
        self._subscription, self._generation = subscription, subscription.generation

    def serve(self, request: Subscribe) -> None:
        subscription, changed = self._subscription, self._shelf.changed
        try:
            self._offer(request)
            self._steps(request.next_step)
        except _Superseded:
            pass
        finally:
            with changed:
                if subscription.generation == self._generation:
                    subscription.orphaned_at = time.monotonic()

    def _check(self) -> None:
        if self._subscription.generation != self._generation or self._shelf.closed:
            raise _Superseded

    def _offer(self, request: Subscribe) -> None:
        subscription = self._subscription
        while True:
            with self._shelf.changed:
                self._check()
                if subscription.offer is None and not subscription.cut:
                    self._shelf.changed.wait(ALIVE_S)
                    self._check()
                offer, cut = subscription.offer, subscription.cut
            if cut:
                return
            if offer is not None:
                if not request.next_step:
                    self._connection.send(offer)
                return
            self._connection.send(Alive(text=waits_for(self._shelf)))

    def _steps(self, next_step: int) -> None:
        subscription, shelf = self._subscription, self._shelf
        while True:
            with shelf.changed:
                self._check()
                while subscription.queue and subscription.queue[0].header.step < next_step:
                    shelf.drop_first(subscription)
                if not subscription.queue and not subscription.cut:
                    shelf.changed.wait(ALIVE_S)
                self._check()
                item = subscription.queue[0] if subscription.queue else None
                cut = subscription.cut
                if item is not None and not cut:
                    item.users += 1  # while it is being sent, whatever happens to the queue
            if cut:
                self._connection.send(Cut(reason=cut, again=shelf.serving))
                return
            if item is None:
                self._connection.send(Alive())
                continue
            try:
                self._send(item)
            finally:
                with shelf.changed:
                    item.users -= 1
            with shelf.changed:
                if subscription.queue and subscription.queue[0] is item:
                    shelf.drop_first(subscription)

    def _send(self, item: StepItem) -> None:
        self._limits.pace.charge(time.monotonic(), item.nbytes)
        self._limits.stream_bytes += item.nbytes
        self._connection.send(item.header)
        for index, bucket in enumerate(item.buckets):
            self._connection.send_tensor(index, bucket)
        if not isinstance(self._connection.receive(), Kept):
            raise WireError("a Kept is expected")


# --- the fetch


class Lending:
    def __init__(self, shelf: Shelf, limits: Limits, connection: StateConnection) -> None:
        self._shelf, self._limits, self._connection = shelf, limits, connection

    def serve(self, request: Borrow, ask: Callable[[], None]) -> None:
        """Until the shadow has what it wants. It may ask for another step on the same connection. `ask`: somebody waits
        for a copy."""
        borrow: Borrow | None = request
        while borrow is not None:
            borrower = Borrower(borrow.step)
            self._shelf.borrow(borrower)
            try:
                ask()
                held = self._wait(borrower)
                if held is None:
                    self._connection.send(Cut(reason=borrower.missed, again=False))
                    return
                self._connection.send(Lent(step=held.step, layout=held.layout))
                borrow = self._pieces(held)
            finally:
                self._shelf.give_back(borrower)

    def _wait(self, borrower: Borrower) -> Held | None:
        while True:
            with self._shelf.changed:
                if borrower.held is None and not borrower.missed and not self._shelf.closed:
                    self._shelf.changed.wait(ALIVE_S)
                if self._shelf.closed:
                    raise ConnectionError("the server closes")
                if borrower.missed:
                    return None
                if borrower.held is not None:
                    return borrower.held
            self._connection.send(Alive(text=waits_for(self._shelf)))

    def _pieces(self, held: Held) -> Borrow | None:
        while True:
            message = self._connection.receive()
            if isinstance(message, Want):
                if not 0 <= message.piece < held.count:
                    raise WireError(f"piece {message.piece} of {held.count}")
                self._send_piece(held, message.piece)
            elif isinstance(message, WholeWanted):
                self._connection.send(Whole(digest=held.whole()))
            elif isinstance(message, Borrow):
                return message
            elif not isinstance(message, Alive):
                raise WireError(f"a {type(message).__name__} is not expected here")

    def _send_piece(self, held: Held, number: int) -> None:
        buffers, size, checksum = held.piece(number)
        with self._shelf.changed:
            wait_s = self._limits.pace.reserve(time.monotonic(), size)
        until = time.monotonic() + wait_s
        while (left_s := until - time.monotonic()) > 0:
            if left_s > ALIVE_S:
                self._connection.send(Alive(text="its rate of catch-up traffic is limited (FTAR_CATCHUP_MBIT)"))
            time.sleep(min(left_s, ALIVE_S))
            if self._shelf.closed:
                raise ConnectionError("the server closes")
        self._limits.fetch_bytes += size
        passes("serve", held.step)
        self._connection.send_chunk(Chunk(index=number, offset=0, size=size, sum=checksum), buffers)
