"""The state server of a rank: what a healthy replica does for one that comes back, without waiting for it.

The training thread is asked for two things only:

* `look`, behind every update and while it waits for the all-reduce: what the state is like, if a shadow wants a copy;
  the copy itself is made beside it (snapshots.py), and `settle` ends or abandons it before the next update;
* `publish`, after the commit of a step: a copy of the averaged buckets, and only while somebody follows.

Everything else happens in threads of this module: listening on every rail, telling members from strangers, and one
thread a connection (serving.py)."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

import torch

from ftar_core.errors import SettingsError, WireError
from ftar_core.runtime.forks import not_in_children
from ftar_core.runtime.rails import Rail
from ftar_core.training.pace import Pace
from ftar_core.training.serving import Lending, Limits, Stream
from ftar_core.training.shelf import Shelf, StepItem, Subscription
from ftar_core.training.state import LiveState
from ftar_core.training.stateconn import StateConnection, open_socket
from ftar_core.training.statewire import (
    KEPT_S,
    PURPOSE_HELLO,
    PURPOSE_WELCOME,
    Borrow,
    Cut,
    StateChallenge,
    StateHello,
    StateRefused,
    StateWelcome,
    Subscribe,
)
from ftar_core.wire.codec import nonce, prove, proved
from ftar_core.wire.ids import EpochId
from ftar_core.wire.messages import Endpoint

log = logging.getLogger(__name__)
# A shadow's handshake takes a millisecond; the oldest stranger goes when one more comes, so that a flood of half-open
# connections cannot lock out a replica that wants to come back.
MAX_STRANGERS = 32
ACCEPT_PAUSE_S = 0.1
DEFAULT_BUFFER_BYTES = 256 * 1024 * 1024


class StateServer:
    """Listens on every rail. `on_request` is called (in a thread of this server) when a shadow waits for a snapshot.
    `mbit`: limit on what is given away, in Mbit/s of user data (0: none)."""

    def __init__(
        self,
        *,
        job: str,
        token: bytes,
        plan: str,
        rails: Sequence[Rail],
        on_request: Callable[[], None],
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        mbit: float = 0.0,
    ) -> None:
        self._job, self._token, self._plan = job, token, plan
        self._on_request = on_request
        self.shelf = Shelf(buffer_bytes)
        self.limits = Limits(Pace(mbit * 1e6 / 8))
        self._lock = threading.Lock()
        self._connections: set[StateConnection] = set()
        self._strangers: dict[StateConnection, None] = {}  # those that have not proved the token, oldest first
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self.endpoints: tuple[Endpoint, ...] = tuple(self._listen(rail) for rail in rails)
        self._thread = threading.Thread(target=self._accept_loop, name="ftar-state-server", daemon=True)
        self._thread.start()

    def _listen(self, rail: Rail) -> Endpoint:
        try:
            listener = open_socket(rail)
            listener.bind((rail.address, 0))
            listener.listen(MAX_STRANGERS)
        except OSError as error:
            raise SettingsError(
                f"rail {rail.name}: {error}", hint="compare FTAR_RAILS with: ip -brief address"
            ) from None
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        return Endpoint(rail=rail.name, addr=rail.address, port=listener.getsockname()[1])

    # --- for the training thread

    def serve(self, serving: bool) -> None:
        """Whether this replica holds state to give (a contributor does, a shadow does not)."""
        if not serving:
            self.shelf.copier.settle()  # what is loaded next must not be mixed into a copy
        self.shelf.serve(serving)

    def wanted(self) -> bool:
        """Does a shadow wait for something that `look` can give?"""
        return self.shelf.wanted()

    def look(
        self,
        step: int,
        epoch: EpochId,
        live: Callable[[], LiveState],
        *,
        behind_update: bool = False,
        waited_s: float = 0.0,
    ) -> None:
        """Between two updates, while somebody wants something: `live` tells what the state after `step` is like. A
        copy begins `behind_update`, or when this thread has waited for some time already."""
        self.shelf.look(step, epoch, live, behind_update=behind_update, waited_s=waited_s)

    def settle(self, step_s: float = 0.0, most_s: float = 0.0) -> str:
        """Before an update: no tensor of the state is read after this. Why a copy was abandoned, if one was. `step_s`:
        how long a step takes; `most_s`: how long an update may wait when copies are abandoned again and again."""
        copier = self.shelf.copier
        done = copier.settle(step_s, most_s)
        self.shelf.changing()
        return "" if done else copier.text

    def followed(self) -> bool:
        """Must steps be published?"""
        return self.shelf.followed()

    def step_memory(self, like: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Memory for the buckets of a step that will be published."""
        return self.shelf.step_memory(like)

    def publish(self, item: StepItem) -> None:
        """Queue a committed step for all followers."""
        self.shelf.publish(item)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        self.shelf.close()
        self._wake_in.close()
        for connection in connections:
            connection.shutdown()
        self._thread.join(timeout=2.0)

    # --- threads of the server

    def _accept_loop(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake_out or not isinstance(key.fileobj, socket.socket):
                    continue
                try:
                    sock, _address = key.fileobj.accept()
                except OSError:
                    time.sleep(ACCEPT_PAUSE_S)  # no descriptor left, most likely: it would fail at once again
                    continue
                not_in_children(sock)
                self._greet(sock)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _greet(self, sock: socket.socket) -> None:
        """A thread for one more stranger."""
        try:
            connection = StateConnection(sock)
        except OSError:
            sock.close()  # gone again already
            return
        with self._lock:
            oldest = next(iter(self._strangers)) if len(self._strangers) >= MAX_STRANGERS else None
            if oldest is not None:
                del self._strangers[oldest]
            self._connections.add(connection)
            self._strangers[connection] = None
        if oldest is not None:
            oldest.shutdown()
        try:
            threading.Thread(target=self._serve, args=(connection,), name="ftar-state", daemon=True).start()
        except RuntimeError:  # no thread left: this one is dropped, the listener lives
            self._forget(connection)

    def _forget(self, connection: StateConnection) -> None:
        connection.close()
        with self._lock:
            self._connections.discard(connection)
            self._strangers.pop(connection, None)

    def _serve(self, connection: StateConnection) -> None:
        try:
            replica = self._handshake(connection)
            if replica is not None:
                self._serve_member(connection, replica)
        except (OSError, WireError) as error:
            log.debug("state connection ended: %s", error)
        finally:
            self._forget(connection)

    def _handshake(self, connection: StateConnection) -> str | None:
        challenge = nonce()
        connection.send(StateChallenge(job=self._job, nonce=challenge))
        hello = connection.receive()
        if not isinstance(hello, StateHello):
            raise WireError("a StateHello is expected")
        if hello.job != self._job or not proved(self._token, PURPOSE_HELLO, self._job, challenge, hello.proof):
            connection.send(StateRefused(reason="wrong job or token"))
            return None
        connection.trust(KEPT_S)
        with self._lock:
            self._strangers.pop(connection, None)
        connection.send(StateWelcome(proof=prove(self._token, PURPOSE_WELCOME, self._job, hello.nonce)))
        return hello.replica

    def _serve_member(self, connection: StateConnection, replica: str) -> None:
        request = connection.receive()
        if not isinstance(request, Subscribe | Borrow):
            raise WireError("a Subscribe or Borrow is expected")
        if request.plan != self._plan:
            connection.send(StateRefused(reason="another bucket plan: the model differs"))
            return
        if isinstance(request, Borrow):
            Lending(self.shelf, self.limits, connection).serve(request, self._on_request)
            return
        found = self._find(request, replica)
        if isinstance(found, Cut):
            connection.send(found)
            return
        stream = Stream(self.shelf, self.limits, connection, found)
        self._on_request()
        stream.serve(request)

    def _find(self, request: Subscribe, replica: str) -> Subscription | Cut:
        if len(request.id) != 16:
            raise WireError("a subscription's id has 16 bytes")
        shelf = self.shelf
        with shelf.changed:
            if not shelf.serving:
                return Cut(reason="this replica holds no state now", again=False)
            subscription = shelf.subscriptions.get(request.id)
            if subscription is None:
                if request.next_step:
                    return Cut(reason="that subscription is over", again=True)
                # A replica follows here once: an older subscription of it is a connection it has given up.
                for key, other in list(shelf.subscriptions.items()):
                    if other.replica == replica:
                        shelf.cut(other, "replaced by a newer subscription")
                        del shelf.subscriptions[key]
                subscription = Subscription(request.id, replica, request.have)
                shelf.subscriptions[request.id] = subscription
            subscription.generation += 1
            subscription.orphaned_at = None
            shelf.changed.notify_all()
        return subscription
