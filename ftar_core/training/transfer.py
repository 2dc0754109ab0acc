"""The state server of a rank: what a healthy replica does for one that comes back, without waiting for it.

The training thread is asked for two things only, both bounded by one memory copy and done where it would wait anyway:

* `attach`, while it waits for the all-reduce of step n: a copy of the state after n-1 for every shadow that has asked.
  Parameters do not change during that wait, so a job that holds (too few replicas) can serve as well as one that runs.
* `publish`, after the commit of a step: a copy of the averaged buckets, and only while somebody follows.

Everything else happens in threads of this module. A shadow that does not read fills its own queue, up to a bound; past
the bound its subscription is cut and it begins again from a newer snapshot. A subscription outlives its connection for
a while, so that a shadow whose rail has failed goes on over another one where it stopped."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ftar_core.errors import SettingsError, WireError
from ftar_core.runtime.breakpoints import passes
from ftar_core.runtime.forks import not_in_children
from ftar_core.runtime.rails import Rail
from ftar_core.training.state import EncodedState
from ftar_core.training.statewire import (
    ALIVE_S,
    KEPT_S,
    PURPOSE_HELLO,
    PURPOSE_WELCOME,
    Alive,
    Cut,
    Kept,
    Offer,
    StateChallenge,
    StateConnection,
    StateEnd,
    StateHello,
    StateRefused,
    StateWelcome,
    StepData,
    Subscribe,
)
from ftar_core.wire.codec import nonce, prove, proved
from ftar_core.wire.ids import NO_EPOCH, EpochId
from ftar_core.wire.messages import Endpoint

log = logging.getLogger(__name__)
# A shadow's handshake takes a millisecond; the oldest stranger goes when one more comes, so that a flood of half-open
# connections cannot lock out a replica that wants to come back.
MAX_STRANGERS = 32
ACCEPT_PAUSE_S = 0.1
DEFAULT_BUFFER_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class StepItem:
    """One committed step for the followers; `buckets` belong to it (shared among followers, never written again)."""

    header: StepData
    buckets: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.header.sizes)


@dataclass
class _Subscription:
    id: bytes
    replica: str
    have: int
    generation: int = 0  # of the connection that serves it
    attached: bool = False
    step: int = 0
    epoch: EpochId = NO_EPOCH
    snapshot: EncodedState | None = None
    queue: deque[StepItem] = field(default_factory=deque)
    queued_bytes: int = 0
    cut: str = ""
    orphaned_at: float | None = None


class _Superseded(Exception):
    """Another connection has taken the subscription over."""


class StateServer:
    """Listens on every rail. `on_request` is called (in a thread of this server) when a shadow waits for a snapshot."""

    def __init__(
        self,
        *,
        job: str,
        token: bytes,
        plan: str,
        rails: Sequence[Rail],
        on_request: Callable[[], None],
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    ) -> None:
        self._job, self._token, self._plan = job, token, plan
        self._on_request = on_request
        self._buffer_bytes = buffer_bytes
        self._changed = threading.Condition()
        self._subscriptions: dict[bytes, _Subscription] = {}
        self._connections: set[StateConnection] = set()
        self._strangers: dict[StateConnection, None] = {}  # those that have not proved the token, oldest first
        self._closed = False
        self._serving = False
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
        with self._changed:
            self._serving = serving
            if not serving:
                for subscription in self._subscriptions.values():
                    self._cut(subscription, "this replica is catching up itself")
            self._changed.notify_all()

    def wanted(self) -> bool:
        """Does a shadow wait for a snapshot?"""
        return any(not s.attached and not s.cut for s in list(self._subscriptions.values()))

    def followed(self) -> bool:
        """Must steps be published?"""
        return any(s.attached and not s.cut for s in list(self._subscriptions.values()))

    def attach(self, step: int, epoch: EpochId, copy: Callable[[], EncodedState]) -> float:
        """Give every waiting shadow the state after `step`; `copy` is called at most once. Returns its cost in ms."""
        self._forget_orphans()
        with self._changed:
            waiting = [s for s in self._subscriptions.values() if not s.attached and not s.cut]
        if not waiting:
            return 0.0
        began = time.monotonic()
        # A shadow that lost another source may hold this step already, or the one whose commit we have yet to hear of.
        state = copy() if any(s.have not in (step, step + 1) for s in waiting) else None
        with self._changed:
            for subscription in waiting:
                fits = subscription.have in (step, step + 1)
                subscription.snapshot = None if fits else state
                subscription.step, subscription.epoch, subscription.attached = step, epoch, True
            self._changed.notify_all()
        return (time.monotonic() - began) * 1000.0

    def publish(self, item: StepItem) -> None:
        """Queue a committed step for all followers."""
        self._forget_orphans()
        with self._changed:
            for subscription in self._subscriptions.values():
                if not subscription.attached or subscription.cut:
                    continue
                if subscription.queued_bytes + item.nbytes > self._buffer_bytes:
                    self._cut(subscription, f"more than {self._buffer_bytes} bytes behind")
                    continue
                subscription.queue.append(item)
                subscription.queued_bytes += item.nbytes
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            connections = list(self._connections)
            self._changed.notify_all()
        self._wake_in.close()
        for connection in connections:
            connection.shutdown()
        self._thread.join(timeout=2.0)

    # --- threads of the server

    def _cut(self, subscription: _Subscription, reason: str) -> None:
        subscription.cut = reason
        subscription.snapshot = None
        subscription.queue.clear()
        subscription.queued_bytes = 0

    def _forget_orphans(self) -> None:
        now = time.monotonic()
        with self._changed:
            for key, subscription in list(self._subscriptions.items()):
                if subscription.orphaned_at is not None and now - subscription.orphaned_at > KEPT_S:
                    del self._subscriptions[key]

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
        with self._changed:
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
        with self._changed:
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
        with self._changed:
            self._strangers.pop(connection, None)
        connection.send(StateWelcome(proof=prove(self._token, PURPOSE_WELCOME, self._job, hello.nonce)))
        return hello.replica

    def _serve_member(self, connection: StateConnection, replica: str) -> None:
        request = connection.receive()
        if not isinstance(request, Subscribe) or len(request.id) != 16:
            raise WireError("a Subscribe is expected")
        if request.plan != self._plan:
            connection.send(StateRefused(reason="another bucket plan: the model differs"))
            return
        found = self._find(request, replica)
        if isinstance(found, Cut):
            connection.send(found)
            return
        subscription, generation = found
        try:
            self._send_snapshot(connection, subscription, generation, request)
            self._send_steps(connection, subscription, generation, request)
        except _Superseded:
            pass
        finally:
            with self._changed:
                if subscription.generation == generation:
                    subscription.orphaned_at = time.monotonic()

    def _find(self, request: Subscribe, replica: str) -> tuple[_Subscription, int] | Cut:
        with self._changed:
            if not self._serving:
                return Cut(reason="this replica holds no state now", again=False)
            subscription = self._subscriptions.get(request.id)
            if subscription is None:
                if request.tensor or request.offset or request.next_step:
                    return Cut(reason="that subscription is over", again=True)
                # A replica follows here once: an older subscription of it is a connection it has given up.
                for key, other in list(self._subscriptions.items()):
                    if other.replica == replica:
                        self._cut(other, "replaced by a newer subscription")
                        del self._subscriptions[key]
                subscription = _Subscription(request.id, replica, request.have)
                self._subscriptions[request.id] = subscription
            subscription.generation += 1
            subscription.orphaned_at = None
            generation = subscription.generation
            self._changed.notify_all()
        self._on_request()
        return subscription, generation

    def _check(self, subscription: _Subscription, generation: int) -> None:
        if subscription.generation != generation or self._closed:
            raise _Superseded

    def _send_snapshot(
        self, connection: StateConnection, subscription: _Subscription, generation: int, request: Subscribe
    ) -> None:
        while True:
            with self._changed:
                self._check(subscription, generation)
                if subscription.attached or subscription.cut:
                    break
                self._changed.wait(ALIVE_S)
                self._check(subscription, generation)
                if subscription.attached or subscription.cut:
                    break
            connection.send(Alive(text="waiting for the step boundary"))
        with self._changed:
            snapshot, step, epoch = subscription.snapshot, subscription.step, subscription.epoch
        if subscription.cut or request.next_step:
            return
        infos = snapshot.infos if snapshot is not None else ()
        if not request.tensor and not request.offset:
            skeleton = snapshot.skeleton if snapshot is not None else b""
            connection.send(Offer(step=step, epoch=epoch, skeleton=skeleton, tensors=infos))
        if snapshot is not None:
            for index in range(request.tensor, len(snapshot.tensors)):
                offset = request.offset if index == request.tensor else 0
                connection.send_tensor(index, snapshot.tensors[index], offset)
                passes("serve", step)
                self._check(subscription, generation)
                if subscription.cut:
                    return
        connection.send(StateEnd(step=step))
        self._receive_kept(connection)
        with self._changed:
            subscription.snapshot = None

    def _send_steps(
        self, connection: StateConnection, subscription: _Subscription, generation: int, request: Subscribe
    ) -> None:
        while True:
            with self._changed:
                self._check(subscription, generation)
                while subscription.queue and subscription.queue[0].header.step < request.next_step:
                    subscription.queued_bytes -= subscription.queue.popleft().nbytes
                if not subscription.queue and not subscription.cut:
                    self._changed.wait(ALIVE_S)
                self._check(subscription, generation)
                item = subscription.queue[0] if subscription.queue else None
                cut = subscription.cut
            if cut:
                connection.send(Cut(reason=cut, again=self._serving))
                return
            if item is None:
                connection.send(Alive())
                continue
            connection.send(item.header)
            for index, bucket in enumerate(item.buckets):
                connection.send_tensor(index, bucket)
            self._receive_kept(connection)
            with self._changed:
                if subscription.queue and subscription.queue[0] is item:
                    subscription.queue.popleft()
                    subscription.queued_bytes -= item.nbytes

    def _receive_kept(self, connection: StateConnection) -> None:
        if not isinstance(connection.receive(), Kept):
            raise WireError("a Kept is expected")


def open_socket(rail: Rail | None, family: int | None = None) -> socket.socket:
    """A TCP socket bound to the device of this rail, so that the kernel cannot move it to another NIC."""
    if family is None:
        address = rail.address if rail is not None else ""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    not_in_children(sock)
    option = getattr(socket, "SO_BINDTODEVICE", None)
    if rail is not None and rail.device and option is not None:
        try:
            sock.setsockopt(socket.SOL_SOCKET, option, rail.device.encode())
        except PermissionError:
            pass  # kernels before 5.7 want CAP_NET_RAW; the address alone then chooses the way
        except OSError:
            sock.close()
            raise
    return sock
