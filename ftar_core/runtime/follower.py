"""A rank that is not the leader: one connection to rank 0, whose orders it carries out and to whom it reports.

`TeamFollower` stands where rank 0 has its member's control loop: the same delegate, the same calls from the session,
and one thread in which everything meets (orders, the native core's events, what the session posts). It has no
machine, because it decides nothing. When its leader's connection closes without an end having been ordered, the
replica is broken, and this rank ends with the code that asks for a new start.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ftar_core.errors import FtarError, NotAssembled, SettingsError, WireError
from ftar_core.protocol.effects import ApplyCommit, EnterEpoch, FollowSources, TellParts
from ftar_core.protocol.events import MemberEvent
from ftar_core.runtime.assembly import ASSEMBLE_S, SLOW_S
from ftar_core.runtime.breakpoints import passes
from ftar_core.runtime.channel import Channel
from ftar_core.runtime.leader import FAREWELL_S, RankDelegate
from ftar_core.runtime.nearby import dial_near, is_near
from ftar_core.runtime.settings import Settings
from ftar_core.runtime.team import RankFacts, report_of
from ftar_core.runtime.waker import Waker
from ftar_core.wire.address import Address
from ftar_core.wire.codec import FRAME_LIMIT, FrameParser, nonce, prove, proved
from ftar_core.wire.exits import RankExit
from ftar_core.wire.messages import CheckpointNotice, Message, RailNotice, RankInfo
from ftar_core.wire.team import (
    PURPOSE_HELLO,
    PURPOSE_REFUSED,
    PURPOSE_WELCOME,
    TEAM_VERSION,
    Agreed,
    Ballot,
    Call,
    CommitOrder,
    DiscardOrder,
    EndOrder,
    EnterOrder,
    ExplainOrder,
    FollowOrder,
    FromLeader,
    PrepareOrder,
    RankHello,
    RankReduced,
    TeamChallenge,
    TeamRefused,
    TeamWelcome,
    Vote,
    WaitOrder,
    Welcomed,
    from_leader,
)

log = logging.getLogger("ftar.team")

CONNECT_S = 3.0
HANDSHAKE_S = 5.0
RETRY_S = 0.1


class TeamFollower:
    """`find` returns the leader's address (and may block until it is known). Raises SettingsError and
    NotAssembled from `start`."""

    def __init__(
        self,
        settings: Settings,
        delegate: RankDelegate,
        *,
        info: RankInfo,
        facts: RankFacts,
        find: Callable[[], Address],
        extra: Sequence[tuple[int, Callable[[], None]]] = (),
    ) -> None:
        self._settings, self._delegate = settings, delegate
        self._info, self._facts = info, facts
        self._find = find
        self._extra = extra
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()
        self._calls: deque[Callable[[], None]] = deque()
        self._channel: Channel[FromLeader] | None = None
        self._leader_host = ""
        self._early: list[FromLeader] = []  # orders that came together with the welcome
        self._thread = threading.Thread(target=self._run, name="ftar-rank", daemon=True)
        self._stop = False
        self._ended = False

    # --- for the session, from any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        channel = self._connect()
        self._channel = channel
        self._selector.register(self._waker.fileno(), selectors.EVENT_READ, self._waker.drain)
        self._selector.register(channel.sock, selectors.EVENT_READ, self._ready)
        for descriptor, callback in self._extra:
            self._selector.register(descriptor, selectors.EVENT_READ, _ignoring_mask(callback))
        self._thread.start()

    def post(self, event: MemberEvent) -> None:
        report = report_of(event)
        if report is not None:
            self._call(lambda: self._report(report))

    def tell(self, message: Message) -> None:
        if isinstance(message, RailNotice | CheckpointNotice):
            self._call(lambda: self._send(message))

    def vote(self, number: int, ballot: Ballot) -> None:
        self._call(lambda: self._send(Vote(round=number, ballot=ballot)))

    def close(self) -> None:
        self._stop = True
        if self._thread.ident is None:
            self._tear_down()
        elif threading.current_thread() is not self._thread:
            self._waker.wake()
            self._thread.join()

    def _call(self, function: Callable[[], None]) -> None:
        if not self._stop:
            self._calls.append(function)
            if threading.current_thread() is not self._thread:
                self._waker.wake()

    # --- to the leader ----------------------------------------------------------------------------------------------

    def _connect(self) -> Channel[FromLeader]:
        began = time.monotonic()
        say_at = began + SLOW_S
        address = self._find()
        while True:
            try:
                return self._greet(address)
            except (OSError, WireError) as error:
                why = str(error)
            now = time.monotonic()
            if now - began > ASSEMBLE_S:
                who = f"rank {self._settings.rank} of {self._settings.replica}"
                raise NotAssembled(
                    f"{who} cannot reach its leader at {address}: {why}",
                    hint="look at the log of rank 0",
                )
            if now >= say_at:
                say_at = now + SLOW_S
                log.warning("rank %d waits for its leader at %s: %s", self._settings.rank, address, why)
            time.sleep(RETRY_S)
            address = self._find()  # that may have been the address of a rank 0 which was about to end

    def _greet(self, address: Address) -> Channel[FromLeader]:
        """Raises OSError or WireError for a leader that is not there (yet), SettingsError for one that refuses."""
        near = dial_near(address)
        if near is not None:
            try:
                return self._introduce(near)
            except (OSError, WireError) as error:
                log.info("rank %d turns to TCP: its leader's Unix socket: %s", self._settings.rank, error)
        return self._introduce(socket.create_connection(address, timeout=CONNECT_S))

    def _introduce(self, sock: socket.socket) -> Channel[FromLeader]:
        channel: Channel[FromLeader] = Channel(sock, FrameParser(from_leader))
        try:
            return self._handshake(channel)
        except (OSError, FtarError):
            channel.close()
            raise

    def _handshake(self, channel: Channel[FromLeader]) -> Channel[FromLeader]:
        settings = self._settings
        deadline = time.monotonic() + HANDSHAKE_S
        challenge = self._next(channel, deadline)
        if not isinstance(challenge, TeamChallenge) or challenge.version != TEAM_VERSION:
            raise WireError("what answers there is no leader of this version")
        mine = nonce()
        channel.send(
            RankHello(
                job=settings.job,
                replica=settings.replica,
                world_size=settings.world_size,
                info=self._info,
                plan=self._facts.plan,
                state=self._facts.state,
                last_step=self._facts.last_step,
                data_plane=self._facts.data_plane,
                nonce=mine,
                proof=prove(settings.token, PURPOSE_HELLO, settings.job, challenge.nonce),
            )
        )
        answer = self._next(channel, deadline)
        if isinstance(answer, TeamRefused) and proved(
            settings.token, PURPOSE_REFUSED, settings.job, mine, answer.proof
        ):
            raise SettingsError(f"rank 0 refuses rank {settings.rank}: {answer.reason}", hint=answer.hint)
        if not isinstance(answer, TeamWelcome) or not proved(
            settings.token, PURPOSE_WELCOME, settings.job, mine, answer.proof
        ):
            raise WireError("what answers there does not know the job token")
        channel.parser.limit = FRAME_LIMIT
        self._early += channel.rest()
        self._leader_host = answer.host if is_near(channel.sock) else channel.sock.getpeername()[0]
        return channel

    def _next(self, channel: Channel[FromLeader], deadline: float) -> FromLeader:
        """The next message of the handshake. Raises OSError or WireError."""
        waiter = select.poll()
        waiter.register(channel.sock, select.POLLIN)
        while True:
            messages = channel.receive()
            if messages:
                self._early = messages[1:]
                return messages[0]
            if channel.broken:
                raise ConnectionError(channel.broken)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no answer within {HANDSHAKE_S:g} s")
            waiter.poll(left_s * 1000)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for order in self._early:
                self._carry_out(order)
            while not self._stop:
                while self._calls:
                    self._calls.popleft()()
                for key, mask in self._selector.select(0 if self._calls else None):
                    key.data(mask)
        except Exception as error:
            log.exception("the rank's control loop failed")
            self._end(RankExit.RESTART, f"internal error in the control loop: {type(error).__name__}: {error}")
        finally:
            self._tear_down()

    def _tear_down(self) -> None:
        channel = self._channel
        if channel is not None:
            while self._calls:
                self._calls.popleft()()
            if channel.pending_bytes and not channel.broken:
                channel.sock.settimeout(FAREWELL_S)
                channel.flush()
            channel.close()
        self._selector.close()
        self._waker.close()

    def _ready(self, mask: int) -> None:
        channel = self._channel
        if channel is None or channel.broken:
            return
        if mask & selectors.EVENT_WRITE:
            channel.flush()
            self._watch(channel)
        if mask & selectors.EVENT_READ:
            for order in channel.receive():
                self._carry_out(order)
        if channel.broken:
            self._broken(channel)

    def _broken(self, channel: Channel[FromLeader]) -> None:
        self._selector.unregister(channel.sock)
        if not self._ended:
            self._end(RankExit.RESTART, f"the leader of {self._settings.replica} is gone ({channel.broken})")

    def _send(self, message: Message) -> None:
        channel = self._channel
        if channel is not None and not channel.broken:
            channel.send(message)
            self._watch(channel)

    def _report(self, report: Message) -> None:
        self._send(report)
        if isinstance(report, RankReduced):
            passes("done-sent", report.step)

    def _watch(self, channel: Channel[FromLeader]) -> None:
        if channel.broken:
            return self._broken(channel)
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.pending_bytes else 0)
        if not self._stop and self._selector.get_key(channel.sock).events != mask:
            self._selector.modify(channel.sock, mask, self._ready)
        return None

    def _carry_out(self, order: FromLeader) -> None:
        delegate = self._delegate
        if self._ended:
            return
        match order:
            case EnterOrder(epoch, step, deal, retry, last_commit_epoch):
                delegate.enter_epoch(EnterEpoch(epoch, step, deal, retry, last_commit_epoch))
            case CommitOrder(commit, loss):
                delegate.apply_commit(ApplyCommit(commit, loss))
            case PrepareOrder(epoch):
                delegate.prepare_ring(epoch)
            case DiscardOrder(epoch_id):
                delegate.discard_ring(epoch_id)
            case FollowOrder(sources, fresh, mbit):
                delegate.follow_sources(FollowSources(sources, fresh, mbit))
            case ExplainOrder(step, epoch_id):
                delegate.tell_parts(TellParts(step, epoch_id, self._settings.rank))
            case WaitOrder(reason):
                delegate.waiting(reason)
            case Welcomed(cookie, port, interval_ms, incarnation):
                delegate.welcomed(cookie, self._leader_host, port, interval_ms, incarnation)
            case Call(number):
                delegate.called(number)
            case Agreed(number, ballots):
                delegate.agreed(number, ballots)
            case EndOrder(exit_code, reason):
                self._end(exit_code, reason)
            case _:
                raise WireError(f"a {type(order).__name__} out of place")

    def _end(self, exit_code: int, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            self._delegate.end(exit_code, reason)
        except Exception:
            log.critical("the session could not be ended (%s): the process ends at once", reason, exc_info=True)
            logging.shutdown()
            os._exit(exit_code or RankExit.RESTART)


def _ignoring_mask(callback: Callable[[], None]) -> Callable[[int], None]:
    def ready(_mask: int) -> None:
        callback()

    return ready
