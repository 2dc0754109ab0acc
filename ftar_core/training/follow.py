"""The shadow's side of catch-up: a state, and every step after it, from anybody who has it.

What it delivers is a sequence that the training thread can apply blindly: a `Snapshot` of step k, then `ReplayStep`
k+1, k+2, ... without a gap, until a newer `Snapshot` starts the sequence again.

One background thread follows the stream of steps of one source; the state itself is fetched from all sources at once
(fetch.py) while the stream runs on, and the steps wait in the *replay buffer* until it is there. The buffer is bounded:
past the bound all begins again from a newer snapshot, with the reason, and after repeated failures after a pause.

A lost connection is first taken for a lost rail: the next rail of the same source goes on where the last one stopped.
When no rail to that source works, the next source is asked; if it stands where we stand, the stream goes on without a
second snapshot, and so does a fetch that others still serve. Nothing here ever makes a healthy replica wait."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ftar_core.errors import StateMismatch, WireError
from ftar_core.runtime.rails import Rail
from ftar_core.training.dial import Identity, Refusal, Way, dial, ways_to
from ftar_core.training.fetch import Fetch
from ftar_core.training.pace import Pace
from ftar_core.training.plan import BucketPlan
from ftar_core.training.state import EncodedState
from ftar_core.training.stateconn import StateConnection
from ftar_core.training.statewire import Alive, Cut, Kept, Offer, StateRefused, StepData, Subscribe
from ftar_core.training.transfer import DEFAULT_BUFFER_BYTES
from ftar_core.wire.ids import EpochId
from ftar_core.wire.messages import Deal, MemberInfo, Verdict

log = logging.getLogger("ftar.session")
BACKOFF_S, BACKOFF_MAX_S = 0.05, 1.0
RESTART_PAUSE_S, RESTART_PAUSE_MAX_S = 1.0, 30.0  # from the second start from a newer snapshot on


@dataclass(frozen=True)
class Snapshot:
    """The state after `step`. `state` None: the training thread holds it already. `by_source`: bytes each gave."""

    step: int
    epoch: EpochId
    state: EncodedState | None
    source: str
    seconds: float = 0.0
    by_source: tuple[tuple[str, int], ...] = ()


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
class _Stream:
    """How far a subscription has come, over all its connections. It serves one sequence."""

    id: bytes
    sequence: int
    offered: bool = False
    moved: bool = False  # something arrived since the last look


class Follower:
    """`on_news` is called in a thread of this module whenever `poll` may have something, or the status text changed.
    `on_restart(text)`: all begins again from a newer snapshot, and why. `mbit`: this shadow's share of what the job
    allows for catching up (0: no limit). `spread`: see Fetch."""

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
        on_restart: Callable[[str], None] = lambda text: None,
        spread: bool = False,
    ) -> None:
        self._identity, self._plan = identity, plan
        self._rails = {rail.name: rail for rail in rails}
        self._sources = tuple(sources)
        self._sequence = 0  # how often it was begun again
        self._why = ""  # the last time
        self._have = have  # the last step of the sequence: held, queued, or being fetched
        self._on_news, self._on_restart = on_news, on_restart
        self._buffer_bytes = buffer_bytes
        self._spread = spread
        self._changed = threading.Condition()
        self._items: deque[Snapshot | ReplayStep] = deque()
        self._queued_bytes = 0
        self._fetch: Fetch | None = None  # of the state that the queued steps follow
        self._alone = False  # sources hold different bytes: fetch from one
        self._restarts = 0
        self._rested = True
        self._pace = Pace()
        self._closed = False
        self._current: tuple[MemberInfo, StateConnection] | None = None
        self._streaming = ""  # the source whose stream runs
        self.text = "looking for a source"
        self.refused = ""  # a source refused us for good (another plan, another token)
        self._thread = threading.Thread(target=self._run, name="ftar-follower", daemon=True)
        self._thread.start()

    # --- for the training thread

    @property
    def connected(self) -> bool:
        """A source's stream is running, and the state that it follows on is here."""
        with self._changed:
            return bool(self._streaming) and self._fetch is None

    @property
    def fetching(self) -> tuple[int, int] | None:
        """(bytes that are here, bytes of the whole) while a state is being fetched."""
        fetch = self._fetch
        return fetch.progress() if fetch is not None else None

    def poll(self) -> Snapshot | ReplayStep | None:
        with self._changed:
            if not self._items or self._fetch is not None:
                return None
            item = self._items.popleft()
            if isinstance(item, ReplayStep):
                self._queued_bytes -= item.nbytes
            if not self._items:
                self._restarts = 0  # this replica keeps up
            return item

    def set_sources(self, sources: Sequence[MemberInfo]) -> None:
        """The contributors have changed. A source that is none any more is left at once."""
        with self._changed:
            if self._sources == tuple(sources):
                return
            self._sources = tuple(sources)
            current, fetch = self._current, self._fetch
            self._changed.notify_all()
        if current is not None and not self._listed(current[0]):
            current[1].shutdown()
        if fetch is not None and not self._alone:
            fetch.ask(sources)

    def set_rate(self, mbit: float) -> None:
        """This shadow's share of what the job allows for catching up (0: no limit)."""
        self._pace.bytes_per_s = mbit * 1e6 / 8

    def close(self) -> None:
        with self._changed:
            self._closed = True
            current, fetch = self._current, self._fetch
            self._changed.notify_all()
        if current is not None:
            current[1].shutdown()
        if fetch is not None:
            fetch.close()
        self._thread.join(timeout=2.0)

    # --- the follower's thread

    def _listed(self, source: MemberInfo) -> bool:
        return any((s.replica, s.incarnation) == (source.replica, source.incarnation) for s in self._sources)

    def _say(self, text: str, *, streaming: str | None = None) -> None:
        if streaming is None:
            streaming = self._streaming
        if (text, streaming) != (self.text, self._streaming):
            self.text, self._streaming = text, streaming
            self._on_news()

    def _run(self) -> None:
        delay_s = BACKOFF_S
        while not self._closed:
            for source in self._sources:
                if self._closed:
                    return
                if not self._listed(source):
                    continue
                self._rest()
                before = self._have
                try:
                    self._follow(source)
                except _SourceLost as lost:
                    self._say(f"{source.replica}: {lost}; asking the next source", streaming="")
                if self._have != before:
                    delay_s = BACKOFF_S
            with self._changed:
                if not self._closed:
                    self._changed.wait(delay_s)
            delay_s = min(delay_s * 2, BACKOFF_MAX_S)

    def _follow(self, source: MemberInfo) -> None:
        """Follow one source over one rail after the other, until none works. Raises _SourceLost, and only that."""
        ways = ways_to(source, self._identity.rank, self._rails)
        if not ways:
            raise _SourceLost("it has no state server")
        stream = _Stream(secrets.token_bytes(16), self._sequence)
        failures, reason = 0, ""
        while failures < 2 * len(ways):
            way = ways[failures % len(ways)]
            stream.moved = False
            try:
                self._one_connection(source, way, stream)
            except (OSError, WireError, StateMismatch) as error:
                reason = f"{way.endpoint.rail}: {error}"
            except Refusal as refusal:
                self._refuse(source, str(refusal))
            if self._closed or not self._listed(source):
                raise _SourceLost("it is no contributor any more")
            if stream.sequence != self._sequence:
                raise _SourceLost(self._why)
            failures = 1 if stream.moved else failures + 1
            self._say(f"{source.replica} over {reason}; trying the next rail", streaming="")
        raise _SourceLost(reason)

    def _one_connection(self, source: MemberInfo, way: Way, stream: _Stream) -> None:
        def opened(connection: StateConnection) -> None:
            with self._changed:
                self._current = (source, connection)
            if self._closed:
                connection.shutdown()

        connection: StateConnection | None = None
        try:
            connection = dial(self._identity, way, opened)
            next_step = self._have + 1 if stream.offered else 0
            connection.send(Subscribe(id=stream.id, plan=self._plan.hash, have=self._have, next_step=next_step))
            if stream.offered:
                self._say(self.text, streaming=source.replica)
            elif self._have < 0:
                self._begin_fetch(source)  # all are asked at the same moment, so that all copy the same step
            self._receive_all(connection, source, stream)
        finally:
            with self._changed:
                self._current = None
            if connection is not None:
                connection.close()

    def _refuse(self, source: MemberInfo, reason: str) -> None:
        self.refused = f"{source.replica} refuses to give its state: {reason}"
        self._on_news()
        raise _SourceLost(reason)

    def _receive_all(self, connection: StateConnection, source: MemberInfo, stream: _Stream) -> None:
        while not self._closed:
            message = connection.receive()
            if isinstance(message, Alive):
                if message.text and not stream.offered:
                    self._say(f"{source.replica}: {message.text}")
            elif isinstance(message, Offer):
                self._offered(message, source, stream)
            elif isinstance(message, StepData):
                self._step(connection, message, source, stream)
                connection.send(Kept(step=message.step))
            elif isinstance(message, StateRefused):
                self._refuse(source, message.reason)
            elif isinstance(message, Cut):
                if message.again:
                    self._start_again(f"{source.replica} has cut the stream: this replica is {message.reason}")
                raise _SourceLost(f"it has cut the stream: {message.reason}")
            else:
                raise WireError(f"a {type(message).__name__} is not expected here")

    def _step(self, connection: StateConnection, header: StepData, source: MemberInfo, stream: _Stream) -> None:
        if not stream.offered:
            raise WireError("a step before the state")
        buckets = self._plan.all_buckets if header.sizes else ()
        if header.sizes != tuple(bucket.nbytes for bucket in buckets):
            raise WireError(f"step {header.step}: buckets of other sizes than in the plan")
        tensors = tuple(torch.empty(bucket.count, dtype=bucket.dtype) for bucket in buckets)
        for index, tensor in enumerate(tensors):
            connection.receive_tensor(index, tensor)
        stream.moved = True
        if header.step <= self._have:
            return  # heard from another source already
        if header.step != self._have + 1:
            self._start_again(f"step {header.step} after {self._have}: steps are missing")
            raise WireError(f"step {header.step} after {self._have}: steps are missing")
        item = ReplayStep(header.step, header.epoch, header.verdict, header.contributors, tensors, header.deal)
        with self._changed:
            too_far = self._queued_bytes + item.nbytes > self._buffer_bytes
            if not too_far:
                self._items.append(item)
                self._queued_bytes += item.nbytes
                self._have = header.step
        if too_far:
            text = self._why_too_far(item.nbytes)
            self._start_again(text)
            raise WireError(text)
        self._on_news()

    # --- the fetch

    def _begin_fetch(self, stream_source: MemberInfo) -> None:
        with self._changed:
            if self._fetch is not None or self._closed:
                return
            fetch = Fetch(
                identity=self._identity,
                plan=self._plan.hash,
                rails=self._rails,
                pace=self._pace,
                on_change=lambda: self._fetch_changed(fetch),
                spread=self._spread,
            )
            self._fetch = fetch
            sources = (stream_source,) if self._alone else self._sources
        fetch.ask([stream_source, *(s for s in sources if s is not stream_source)])

    def _offered(self, offer: Offer, source: MemberInfo, stream: _Stream) -> None:
        if stream.offered:
            raise WireError("an Offer is not expected here")
        stream.offered = stream.moved = True
        if not offer.skeleton:
            if self._have < 0:
                raise WireError("an Offer without a state")
            self._say(f"following {source.replica}", streaming=source.replica)
            self._on_news()
            return  # it stands where we stand, and so does a fetch that is running
        old = self._fetch
        if old is not None and old.offer is not None:
            self._drop_sequence()
            old = None
        elif self._have >= 0:
            self._drop_sequence()  # what is held is too old for this source
        if old is None:
            self._begin_fetch(source)
        fetch = self._fetch
        if fetch is None:
            return  # closed
        fetch.offered(offer)
        with self._changed:
            self._have = offer.step
        self._say(fetch.text(), streaming=source.replica)

    def _fetch_changed(self, fetch: Fetch) -> None:
        """In a thread of the fetch."""
        with self._changed:
            if fetch is not self._fetch or self._closed:
                return
            offer = fetch.offer
            done = fetch.complete and offer is not None
            if done and offer is not None:
                seconds = time.monotonic() - fetch.began
                given = tuple(sorted(fetch.by_source().items()))
                names = ", ".join(name for name, _ in given) or self._streaming
                self._items.appendleft(Snapshot(offer.step, offer.epoch, fetch.state(), names, seconds, given))
                self._fetch, self._alone = None, False
        if done:
            fetch.close()
            self._say(f"following {self._streaming}" if self._streaming else self.text)
            self._on_news()
        elif fetch.differ or fetch.failed:
            if fetch.differ:
                self._alone = True
            self._start_again(fetch.differ or f"the state cannot be fetched: {fetch.failed}", quietly=offer is None)
        else:
            if not self._alone:
                fetch.ask(self._sources)  # another one, where one is out
            self._say(fetch.text() if offer is not None else self.text)

    def _drop_sequence(self) -> None:
        with self._changed:
            fetch, self._fetch = self._fetch, None
            self._have = -1
            self._items.clear()
            self._queued_bytes = 0
        if fetch is not None:
            fetch.close()

    def _start_again(self, why: str, *, quietly: bool = False) -> None:
        """From a newer snapshot: whatever was fetched and kept is given up. The present connection ends."""
        self._drop_sequence()
        with self._changed:
            self._sequence += 1
            self._why = why
            self._restarts += not quietly
            self._rested = False
            current = self._current
        if not quietly:
            log.warning("catching up begins again from a newer snapshot: %s", why)
            self._on_restart(why)
        self._say(why, streaming="")
        if current is not None:
            current[1].shutdown()

    def _rest(self) -> None:
        """Whoever begins again and again gives the sources time."""
        with self._changed:
            if self._rested:
                return
            self._rested = True
            if self._restarts > 1:
                pause_s = min(RESTART_PAUSE_MAX_S, RESTART_PAUSE_S * 2 ** (self._restarts - 2))
                self._changed.wait_for(lambda: self._closed, pause_s)

    def _why_too_far(self, step_bytes: int) -> str:
        """What must be set so that it works the next time."""
        with self._changed:
            steps = sum(isinstance(item, ReplayStep) for item in self._items)
            fetch = self._fetch
        bound = f"the replay buffer ({self._buffer_bytes / 1e6:.0f} MB) is full with {steps} steps"
        if fetch is None:
            return f"{bound}: steps come faster than they are replayed here; set FTAR_REPLAY_BUFFER to more"
        have, whole = fetch.progress()
        share = have / whole if whole else 1.0
        rate = fetch.bytes_per_s
        needed = (steps + 1) * step_bytes / share if share > 0 else 0.0
        hint = f"set FTAR_REPLAY_BUFFER to {needed * 1.25 / 1e6:.0f}M or more, or" if needed else "set"
        return (
            f"{bound} and {100 * share:.0f} % of the state ({whole / 1e6:.0f} MB) are here at {rate * 8e-6:.0f} "
            f"Mbit/s: {hint} FTAR_CATCHUP_MBIT of the sources higher"
        )
