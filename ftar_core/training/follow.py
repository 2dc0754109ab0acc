"""The shadow's side of catch-up: one background thread that gets a state and every step after it, from anybody who has
it.

What it delivers is a sequence that the training thread can apply blindly: a `Snapshot` of step k, then `ReplayStep`
k+1, k+2, ... without a gap, until a newer `Snapshot` starts the sequence again.

A lost connection is first taken for a lost rail: the next rail of the same source goes on at the byte where the last
one stopped. When no rail to that source works, the next source is asked; if it stands where we stand, the stream goes
on without a second snapshot. Nothing here ever makes a healthy replica wait."""

from __future__ import annotations

import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ftar_core.errors import StateMismatch, WireError
from ftar_core.runtime.breakpoints import passes
from ftar_core.runtime.rails import Rail
from ftar_core.training.plan import BucketPlan
from ftar_core.training.state import MAX_TENSORS, EncodedState, TensorInfo, empty_tensor, raw_bytes
from ftar_core.training.statewire import (
    PURPOSE_HELLO,
    PURPOSE_WELCOME,
    SILENCE_S,
    Alive,
    Chunk,
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
from ftar_core.training.transfer import DEFAULT_BUFFER_BYTES, open_socket
from ftar_core.wire.codec import nonce, prove, proved
from ftar_core.wire.ids import EpochId
from ftar_core.wire.messages import Deal, Endpoint, MemberInfo, Verdict

CONNECT_S = 1.0
BACKOFF_S, BACKOFF_MAX_S = 0.05, 1.0


@dataclass(frozen=True)
class Identity:
    """Who asks, and of which rank."""

    job: str
    token: bytes
    replica: str
    incarnation: int
    rank: int = 0


@dataclass(frozen=True)
class Snapshot:
    """The state after `step`. `state` None: the training thread holds it already."""

    step: int
    epoch: EpochId
    state: EncodedState | None
    source: str


@dataclass(frozen=True)
class ReplayStep:
    """A committed step; `buckets` are its averaged gradients (empty when nobody updates). `deal`: of the next step."""

    step: int
    epoch: EpochId
    verdict: Verdict
    contributors: tuple[str, ...]
    buckets: tuple[torch.Tensor, ...]
    deal: Deal | None = None

    @property
    def nbytes(self) -> int:
        return sum(bucket.numel() * bucket.element_size() for bucket in self.buckets)


class _SourceLost(Exception):
    """This source is of no use now; the next one, please."""


@dataclass
class _Fetch:
    """How far a subscription has come, over all its connections."""

    id: bytes
    offer: Offer | None = None
    tensors: tuple[torch.Tensor, ...] = ()
    tensor: int = 0  # the next byte of the snapshot: tensor and offset in it
    offset: int = 0
    complete: bool = False
    moved: bool = False  # something arrived since the last look


class Follower:
    """`on_news` is called in the follower's thread whenever `poll` may have something, or the status text changed."""

    def __init__(
        self,
        *,
        identity: Identity,
        plan: BucketPlan,
        rails: Sequence[Rail],
        sources: Sequence[MemberInfo],
        have: int,
        on_news: Callable[[], None],
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    ) -> None:
        self._identity, self._plan = identity, plan
        self._rails = {rail.name: rail for rail in rails}
        self._sources = tuple(sources)
        self._have = have
        self._on_news = on_news
        self._buffer_bytes = buffer_bytes
        self._changed = threading.Condition()
        self._items: deque[Snapshot | ReplayStep] = deque()
        self._queued_bytes = 0
        self._closed = False
        self._current: tuple[MemberInfo, StateConnection] | None = None
        self.connected = False  # to a source, and its stream is running
        self.text = "looking for a source"
        self.refused = ""  # a source refused us for good (another plan, another token)
        self._thread = threading.Thread(target=self._run, name="ftar-follower", daemon=True)
        self._thread.start()

    # --- for the training thread

    def poll(self) -> Snapshot | ReplayStep | None:
        with self._changed:
            if not self._items:
                return None
            item = self._items.popleft()
            if isinstance(item, ReplayStep):
                self._queued_bytes -= item.nbytes
            return item

    def set_sources(self, sources: Sequence[MemberInfo]) -> None:
        """The contributors have changed. A source that is none any more is left at once."""
        with self._changed:
            self._sources = tuple(sources)
            current = self._current
            self._changed.notify_all()
        if current is not None and not self._listed(current[0]):
            current[1].shutdown()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            current = self._current
            self._changed.notify_all()
        if current is not None:
            current[1].shutdown()
        self._thread.join(timeout=2.0)

    # --- the follower's thread

    def _listed(self, source: MemberInfo) -> bool:
        return any((s.replica, s.incarnation) == (source.replica, source.incarnation) for s in self._sources)

    def _say(self, text: str, *, connected: bool) -> None:
        if (text, connected) != (self.text, self.connected):
            self.text, self.connected = text, connected
            self._on_news()

    def _run(self) -> None:
        delay_s = BACKOFF_S
        while not self._closed:
            for source in self._sources:
                if self._closed:
                    return
                if not self._listed(source):
                    continue
                before = self._have
                try:
                    self._follow(source)
                except _SourceLost as lost:
                    self._say(f"{source.replica}: {lost}; asking the next source", connected=False)
                if self._have != before:
                    delay_s = BACKOFF_S
            with self._changed:
                if not self._closed:
                    self._changed.wait(delay_s)
            delay_s = min(delay_s * 2, BACKOFF_MAX_S)

    def _ways(self, source: MemberInfo) -> list[tuple[Rail | None, Endpoint]]:
        info = source.at(self._identity.rank)
        return [(self._rails.get(endpoint.rail), endpoint) for endpoint in info.state] if info is not None else []

    def _follow(self, source: MemberInfo) -> None:
        """Follow one source over one rail after the other, until none works. Raises _SourceLost, and only that."""
        ways = self._ways(source)
        if not ways:
            raise _SourceLost("it has no state server")
        fetch = _Fetch(secrets.token_bytes(16))
        failures, reason = 0, ""
        while failures < 2 * len(ways):
            rail, endpoint = ways[failures % len(ways)]
            fetch.moved = False
            try:
                self._one_connection(source, rail, endpoint, fetch)
            except (OSError, WireError, StateMismatch) as error:
                reason = f"{endpoint.rail}: {error}"
            if self._closed or not self._listed(source):
                raise _SourceLost("it is no contributor any more")
            failures = 1 if fetch.moved else failures + 1
            self._say(f"{source.replica} over {reason}; trying the next rail", connected=False)
        raise _SourceLost(reason)

    def _one_connection(self, source: MemberInfo, rail: Rail | None, endpoint: Endpoint, fetch: _Fetch) -> None:
        sock = open_socket(rail, socket.AF_INET6 if ":" in endpoint.addr else socket.AF_INET)
        try:
            sock.settimeout(CONNECT_S)
            if rail is not None:
                sock.bind((rail.address, 0))
            sock.connect((endpoint.addr, endpoint.port))
            connection = StateConnection(sock)
            with self._changed:
                self._current = (source, connection)
            if self._closed:
                return
            self._handshake(connection, source)
            complete = fetch.complete
            connection.send(
                Subscribe(
                    id=fetch.id,
                    plan=self._plan.hash,
                    have=self._have,
                    tensor=0 if complete else fetch.tensor,
                    offset=0 if complete else fetch.offset,
                    next_step=self._have + 1 if complete else 0,
                )
            )
            self._receive_all(connection, source, fetch)
        finally:
            with self._changed:
                self._current = None
            sock.close()

    def _handshake(self, connection: StateConnection, source: MemberInfo) -> None:
        who = self._identity
        challenge = connection.receive()
        if not isinstance(challenge, StateChallenge) or challenge.job != who.job:
            raise WireError("not the state server of this job")
        mine = nonce()
        proof = prove(who.token, PURPOSE_HELLO, who.job, challenge.nonce)
        connection.send(
            StateHello(job=who.job, replica=who.replica, incarnation=who.incarnation, nonce=mine, proof=proof)
        )
        welcome = connection.receive()
        if isinstance(welcome, StateRefused):
            self._refuse(source, welcome.reason)
        if not isinstance(welcome, StateWelcome) or not proved(
            who.token, PURPOSE_WELCOME, who.job, mine, welcome.proof
        ):
            raise WireError("it does not know the job token")
        connection.trust(SILENCE_S)

    def _refuse(self, source: MemberInfo, reason: str) -> None:
        self.refused = f"{source.replica} refuses to give its state: {reason}"
        self._on_news()
        raise _SourceLost(reason)

    def _receive_all(self, connection: StateConnection, source: MemberInfo, fetch: _Fetch) -> None:
        while not self._closed:
            message = connection.receive()
            if isinstance(message, Alive):
                self._say(f"{source.replica}: {message.text}" if message.text else self.text, connected=fetch.complete)
            elif isinstance(message, Offer):
                self._begin_snapshot(message, source, fetch)
            elif isinstance(message, Chunk):
                self._snapshot_chunk(connection, message, fetch)
            elif isinstance(message, StateEnd):
                self._end_snapshot(message, source, fetch)
                connection.send(Kept(step=message.step))
            elif isinstance(message, StepData):
                self._step(connection, message, source, fetch)
                connection.send(Kept(step=message.step))
            elif isinstance(message, StateRefused):
                self._refuse(source, message.reason)
            elif isinstance(message, Cut):
                raise _SourceLost(f"it has cut the stream: {message.reason}")
            else:
                raise WireError(f"a {type(message).__name__} is not expected here")

    def _start_again(self) -> None:
        with self._changed:
            self._have = -1
            self._items.clear()
            self._queued_bytes = 0

    def _begin_snapshot(self, offer: Offer, source: MemberInfo, fetch: _Fetch) -> None:
        if fetch.complete or len(offer.tensors) > MAX_TENSORS:
            raise WireError("an Offer is not expected here")
        fetch.offer, fetch.tensor, fetch.offset, fetch.moved = offer, 0, 0, True
        fetch.tensors = tuple(self._memory(info) for info in offer.tensors)
        self._skip_empty(fetch)
        self._say(f"fetching the state after step {offer.step} from {source.replica}", connected=False)

    @staticmethod
    def _memory(info: TensorInfo) -> torch.Tensor:
        if info.nbytes > 1 << 40:
            raise WireError(f"tensor {info.name} of {info.nbytes} bytes")
        return empty_tensor(info)

    @staticmethod
    def _skip_empty(fetch: _Fetch) -> None:
        while fetch.tensor < len(fetch.tensors) and fetch.tensors[fetch.tensor].numel() == 0:
            fetch.tensor += 1

    def _snapshot_chunk(self, connection: StateConnection, chunk: Chunk, fetch: _Fetch) -> None:
        if fetch.offer is None or fetch.complete or chunk.index != fetch.tensor or chunk.offset != fetch.offset:
            raise WireError(f"chunk {chunk.index} at {chunk.offset} out of order")
        if fetch.tensor >= len(fetch.tensors):
            raise WireError("more chunks than were offered")
        memory = raw_bytes(fetch.tensors[fetch.tensor])
        connection.receive_chunk(chunk, memory)
        fetch.moved = True
        fetch.offset += chunk.size
        passes("fetch", fetch.offer.step)
        if fetch.offset == len(memory):
            fetch.tensor, fetch.offset = fetch.tensor + 1, 0
            self._skip_empty(fetch)

    def _end_snapshot(self, end: StateEnd, source: MemberInfo, fetch: _Fetch) -> None:
        offer = fetch.offer
        if offer is None or fetch.complete or end.step != offer.step or fetch.tensor != len(fetch.tensors):
            raise WireError("the snapshot ends before all of it has arrived")
        fetch.complete = True
        if offer.tensors or self._have < 0:
            state = EncodedState(offer.skeleton, offer.tensors, fetch.tensors)
            self._put(Snapshot(offer.step, offer.epoch, state, source.replica))
            self._have = offer.step
        fetch.tensors = ()
        self._say(f"following {source.replica}", connected=True)

    def _step(self, connection: StateConnection, header: StepData, source: MemberInfo, fetch: _Fetch) -> None:
        if not fetch.complete:
            raise WireError("a step before the snapshot")
        buckets = self._plan.all_buckets if header.sizes else ()
        if header.sizes != tuple(bucket.nbytes for bucket in buckets):
            raise WireError(f"step {header.step}: buckets of other sizes than in the plan")
        tensors = tuple(torch.empty(bucket.count, dtype=bucket.dtype) for bucket in buckets)
        for index, tensor in enumerate(tensors):
            memory = raw_bytes(tensor)
            done = 0
            while done < len(memory):
                chunk = connection.receive()
                if not isinstance(chunk, Chunk) or (chunk.index, chunk.offset) != (index, done):
                    raise WireError(f"step {header.step}: a chunk is missing")
                connection.receive_chunk(chunk, memory)
                done += chunk.size
        fetch.moved = True
        if header.step <= self._have:
            return  # heard from another source already
        if header.step != self._have + 1:
            self._start_again()
            raise WireError(f"step {header.step} after {self._have}: steps are missing")
        self._put(ReplayStep(header.step, header.epoch, header.verdict, header.contributors, tensors, header.deal))
        self._have = header.step
        self._say(f"following {source.replica}", connected=True)

    def _put(self, item: Snapshot | ReplayStep) -> None:
        size = item.nbytes if isinstance(item, ReplayStep) else 0
        with self._changed:
            too_far = self._queued_bytes + size > self._buffer_bytes
            if not too_far:
                self._items.append(item)
                self._queued_bytes += size
        if too_far:
            self._start_again()
            raise WireError("this shadow is too far behind: it starts again from a newer snapshot")
        self._on_news()
