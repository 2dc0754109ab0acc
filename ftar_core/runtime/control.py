"""One member's connection to the coordinator: dialing, the handshake, frames in and out. No decisions beyond that.

Nothing that an unproven coordinator says gets past this class. The Challenge is proved with the token, since a member
promises itself to its term; the Welcome, since everything after it is obeyed; a refusal, since it may end the member.
Where a proof fails, one of the two has the wrong token. As long as this process was never welcomed anywhere, that is
taken to be this one, which then ends with a clear word; after the first Welcome its token is known to be right.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable
from typing import Any, Protocol

from ftar_core.protocol.effects import SendHello
from ftar_core.runtime.channel import Channel
from ftar_core.runtime.dialer import Dialer
from ftar_core.runtime.settings import Settings
from ftar_core.runtime.software import software
from ftar_core.wire.codec import (
    FRAME_LIMIT,
    STRANGER_LIMIT,
    FrameParser,
    encode,
    from_coordinator,
    nonce,
    prove,
    proved,
    to_leader_of_several,
    vouch,
)
from ftar_core.wire.ids import Term
from ftar_core.wire.messages import (
    PROTOCOL_VERSION,
    Challenge,
    FromCoordinator,
    Hello,
    Knock,
    Message,
    OpReply,
    Outdated,
    RankInfo,
    Refused,
    Welcome,
)

log = logging.getLogger("ftar.member")
FAREWELL_S = 1.0  # for the last messages (Leaving) to be taken by the kernel


class ControlListener(Protocol):
    """What the owner of the connection is told, in the loop's thread."""

    def challenged(self, term: Term) -> None:
        """Answer with `hello` or `outdated`."""

    def welcomed(self, welcome: Welcome, host: str, port: int) -> None:
        """The coordinator has proved itself; heartbeats go to `host` and `port`."""

    def received(self, message: Message) -> None:
        """A message of a proven coordinator, or a Refused that is to be believed."""

    def lost(self, why: str) -> None:
        """The connection, or the attempt, is over; it is closed already."""

    def misplaced(self, why: str) -> None:
        """This cannot be our coordinator, and never was: starting again will not help."""


class ControlConnection:
    """`call` hands a function to the loop's thread (dialer.py)."""

    def __init__(
        self,
        settings: Settings,
        listener: ControlListener,
        selector: selectors.BaseSelector,
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._selector = selector
        self._call = call
        self._several = settings.world_size > 1
        self._ever_welcomed = False
        # dialer -> channel -> challenge -> nonce (Hello sent) -> welcomed; all forgotten by `drop`.
        self._dialer: Dialer | None = None
        self._channel: Channel[FromCoordinator] | None = None
        self._challenge: Challenge | None = None
        self._my_nonce = b""
        self.welcomed = False
        self._untold: list[Message] = []  # said between Hello and Welcome

    @property
    def open(self) -> bool:
        """Connected, or trying to."""
        return self._dialer is not None or self._channel is not None

    def dial(self) -> None:
        self.drop()
        self._dialer = Dialer(self._settings.coordinator, self._selector, self._call, self._connected, self.fail)
        self._dialer.start()

    def hello(self, order: SendHello, described: tuple[tuple[RankInfo, ...], str, int]) -> None:
        if self._channel is None or self._challenge is None:
            return
        ranks, plan, last_step = described
        self._my_nonce = nonce()
        self._introduce(
            Hello(
                job=self._settings.job,
                replica=self._settings.replica,
                incarnation=order.incarnation,
                ranks=ranks,
                plan=plan,
                report=order.report,
                client_nonce=self._my_nonce,
                proof=prove(self._settings.token, "member-hello", self._settings.job, self._challenge.nonce),
                last_step=last_step,
                software=self._software(),
            )
        )

    def _software(self) -> dict[str, str]:
        """What must be the same on all replicas: a difference is named at the door (protocol/likeness.py)."""
        settings = self._settings
        found = {**software(), "FTAR_ROTATION": str(settings.rotation), "FTAR_DATA_PLANE": settings.data_plane}
        if settings.nccl:
            found["nccl"] = settings.nccl
        return found

    def _introduce(self, hello: Hello) -> None:
        """A replica of hundreds of ranks says more than a stranger may: it proves itself first."""
        frame, challenge = encode(hello), self._challenge
        if len(frame) > STRANGER_LIMIT and challenge is not None:
            proof = prove(self._settings.token, "member-knock", self._settings.job, challenge.nonce)
            self._send(Knock(job=self._settings.job, proof=proof))
        self._send(hello)

    def outdated(self, promised: Term) -> None:
        if self._channel is None or self._challenge is None:
            return
        proof = prove(self._settings.token, "outdated", self._settings.job, self._challenge.nonce)
        self._send(Outdated(promised=promised, proof=proof))

    def tell(self, message: Message) -> None:
        """Send, or drop if there is no connection: the next Hello tells the state anew."""
        if self.welcomed:
            self._send(message)
        elif self._my_nonce:
            self._untold.append(message)

    def fail(self, why: str) -> None:
        self.drop()
        self._listener.lost(why)

    def drop(self) -> None:
        if self._dialer is not None:
            self._dialer.close()
            self._dialer = None
        if self._channel is not None:
            self._selector.unregister(self._channel.sock)
            self._channel.close()
            self._channel = None
        self._challenge = None
        self._my_nonce = b""
        self.welcomed = False
        self._untold.clear()

    def part(self) -> None:
        """Close after the kernel has taken what was said, waiting at most FAREWELL_S for it."""
        if self._channel is not None and self._channel.pending_bytes:
            self._channel.sock.settimeout(FAREWELL_S)
            self._channel.flush()
        self.drop()

    # --- what the socket says --------------------------------------------------------------------------------------

    def _connected(self, sock: socket.socket) -> None:
        self._dialer = None
        parser: FrameParser[Any] = FrameParser(to_leader_of_several if self._several else from_coordinator)
        self._channel = Channel(sock, parser)
        self._selector.register(sock, selectors.EVENT_READ, self._ready)

    def _ready(self, mask: int) -> None:
        channel = self._channel
        if channel is None:
            return
        if mask & selectors.EVENT_WRITE:
            channel.flush()
            self._watch(channel)
        if mask & selectors.EVENT_READ:
            for message in channel.incoming():
                self._arrived(message)
                if self._channel is not channel:
                    return  # dropped while its messages were worked off: the rest is void
            if channel.broken:
                self.fail(channel.broken)

    def _arrived(self, message: FromCoordinator) -> None:
        if self.welcomed:
            if isinstance(message, (Challenge, Welcome, OpReply)):
                self.fail(f"it sent a {type(message).__name__} in the middle of the job")
            else:
                self._listener.received(message)
        elif isinstance(message, Challenge) and self._challenge is None:
            self._challenged(message)
        elif isinstance(message, Welcome) and self._challenge is not None and self._my_nonce:
            self._check_welcome(message, self._challenge)
        elif isinstance(message, Refused) and self._challenge is not None:
            self._refused(message)
        else:
            self.fail(f"it sent a {type(message).__name__} during the handshake")

    def _challenged(self, challenge: Challenge) -> None:
        where, mine = self._settings.coordinator, self._settings.job
        wrong = ""
        if challenge.version != PROTOCOL_VERSION:
            wrong = (
                f"the coordinator at {where} speaks version {challenge.version} of the protocol, this replica version"
                f" {PROTOCOL_VERSION}: install the same version of ftctl on both"
            )
        elif challenge.job != mine:
            wrong = (
                f"the coordinator at {where} runs job {challenge.job!r}, not {mine!r}:"
                " correct FTAR_COORDINATOR or FTAR_JOB"
            )
        elif not proved(
            self._settings.token, "challenge", mine, vouch(challenge.nonce, challenge.term), challenge.proof
        ):
            wrong = (
                f"the coordinator at {where} and this replica do not have the same job token:"
                " FTAR_TOKEN_FILE must hold what ftar-coordinator --token-file holds"
            )
        if not wrong:
            self._challenge = challenge
            self._listener.challenged(challenge.term)
        elif self._ever_welcomed:
            self.fail(wrong)  # ours is gone for now, and something else has taken its port
        else:
            self.drop()
            self._listener.misplaced(wrong)

    def _check_welcome(self, welcome: Welcome, challenge: Challenge) -> None:
        settings, channel = self._settings, self._channel
        if not proved(settings.token, "welcome", settings.job, self._my_nonce, welcome.proof):
            self.fail("what answers there does not know the job token")
            return
        if welcome.term != challenge.term or channel is None:
            self.fail("it changed its term during the handshake")
            return
        self.welcomed = self._ever_welcomed = True
        channel.parser.limit = FRAME_LIMIT
        untold, self._untold = self._untold, []
        for message in untold:
            self._send(message)
        host = str(channel.sock.getpeername()[0])
        self._listener.welcomed(welcome, host, welcome.heartbeat_port or settings.coordinator.port)

    def _refused(self, refused: Refused) -> None:
        settings, channel = self._settings, self._channel
        genuine = proved(settings.token, "refused", settings.job, self._my_nonce, refused.proof)
        if self._ever_welcomed and not genuine:
            self.fail(f"something that does not know the job token refuses: {refused.reason}")
            return
        self._listener.received(refused)
        if self._channel is channel and channel is not None:
            self.fail(f"it refuses: {refused.reason}")

    def _send(self, message: Message) -> None:
        channel = self._channel
        if channel is None:
            return
        channel.send(message)
        self._watch(channel)
        if channel.broken:
            # Later, not here: the machine is in the middle of its effects.
            self._call(lambda: self.fail(channel.broken) if self._channel is channel else None)

    def _watch(self, channel: Channel[FromCoordinator]) -> None:
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.pending_bytes else 0)
        if not channel.broken and self._selector.get_key(channel.sock).events != mask:
            self._selector.modify(channel.sock, mask, self._ready)
