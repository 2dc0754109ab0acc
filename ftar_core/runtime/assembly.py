"""The ranks of a replica come to their leader: where it listens, who is a rank of this replica, and who does not fit.

They are started together, but each imports and builds its model before it connects. Whoever connects, to the TCP port
or to the Unix socket beside it (nearby.py), gets a challenge; one that cannot prove the job token is dropped after
STRANGER_S. After the last rank nobody listens any more.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from ftar_core.errors import NotAssembled, SettingsError
from ftar_core.runtime.channel import Channel
from ftar_core.runtime.forks import not_in_children
from ftar_core.runtime.nearby import is_near, listen_near, trusted
from ftar_core.runtime.settings import Settings
from ftar_core.runtime.team import RankFacts, misfit
from ftar_core.wire.address import Address
from ftar_core.wire.codec import FRAME_LIMIT, FrameParser, nonce, prove, proved
from ftar_core.wire.team import (
    PURPOSE_HELLO,
    PURPOSE_REFUSED,
    PURPOSE_WELCOME,
    TEAM_VERSION,
    RankHello,
    TeamChallenge,
    TeamRefused,
    TeamWelcome,
    ToLeader,
    to_leader,
)

log = logging.getLogger("ftar.team")

ASSEMBLE_S = 300.0  # for all ranks to come
STRANGER_S = 3.0
MAX_STRANGERS = 32
SLOW_S = 10.0  # then it is said for whom the replica waits


@dataclass
class TeamRank:
    """A rank that was taken in, as its leader knows it."""

    channel: Channel[ToLeader]
    hello: RankHello
    gone: bool = False


@dataclass
class _Stranger:
    channel: Channel[ToLeader]
    nonce: bytes
    since: float


class Assembly:
    """`ranks`: who is here, by number. `ready(number, mask)` is called for what a rank sends that was taken in already,
    and takes it out of `ranks` if its connection breaks: it may come again."""

    def __init__(
        self,
        settings: Settings,
        facts: RankFacts,
        selector: selectors.BaseSelector,
        ready: Callable[[int, int], None],
    ) -> None:
        self._settings, self._facts = settings, facts
        self._selector, self._ready = selector, ready
        self.ranks: dict[int, TeamRank] = {}
        self._strangers: list[_Stranger] = []
        self._misfit = ""
        self._host = ""  # an address of this one, for ranks that come over the Unix socket

    def gather(self, publish: Callable[[Address], None]) -> str:
        """Block until all ranks are here; the address at which they were received. Raises NotAssembled for ranks that
        do not come, SettingsError for ranks that do not fit together."""
        listeners, address = listen(self._settings)
        try:
            bound = str(listeners[0].getsockname()[0])
            self._host = _reachable(bound)
            for listener in listeners:
                not_in_children(listener)  # they would keep the port and the name
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ, self._acceptor(listener))
            publish(address)
            self._wait()
            near = sum(is_near(rank.channel.sock) for rank in self.ranks.values())
            log.info("%s: %d ranks are here, %d of them over the Unix socket", address, len(self.ranks), near)
            return bound
        finally:
            for listener in listeners:
                if listener in self._selector.get_map():
                    self._selector.unregister(listener)
                listener.close()
            for stranger in list(self._strangers):
                self._drop_stranger(stranger)

    def _wait(self) -> None:
        began = time.monotonic()
        say_at = began + SLOW_S
        while len(self.ranks) < self._settings.world_size - 1:
            now = time.monotonic()
            if self._misfit:
                raise SettingsError(self._misfit, hint="start all ranks of a replica with the same script and options")
            if now - began > ASSEMBLE_S:
                raise NotAssembled(
                    f"{self._absent()} did not connect within {ASSEMBLE_S:g} s",
                    hint=f"start {self._settings.world_size} ranks (WORLD_SIZE), and look at their logs",
                )
            if now >= say_at:
                say_at = now + SLOW_S
                log.warning("%s waits for %s", self._settings.replica, self._absent())
            for stranger in [s for s in self._strangers if now - s.since > STRANGER_S]:
                self._drop_stranger(stranger)
            for key, mask in self._selector.select(0.2):
                key.data(mask)

    def _absent(self) -> str:
        missing = [str(r) for r in range(1, self._settings.world_size) if r not in self.ranks]
        return f"rank {', '.join(missing[:8])} of {self._settings.replica}"

    def _acceptor(self, listener: socket.socket) -> Callable[[int], None]:
        return lambda _mask: self._accept(listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        if not trusted(sock):
            sock.close()  # a rank that is another user's uses TCP
            return
        if len(self._strangers) >= MAX_STRANGERS + self._settings.world_size:  # all ranks may come at once
            self._drop_stranger(self._strangers[0])
        try:
            channel: Channel[ToLeader] = Channel(sock, FrameParser(to_leader))
        except OSError:
            sock.close()  # gone again already
            return
        stranger = _Stranger(channel, nonce(), time.monotonic())
        self._strangers.append(stranger)
        self._selector.register(sock, selectors.EVENT_READ, lambda _mask: self._greet(stranger))
        channel.send(TeamChallenge(job=self._settings.job, replica=self._settings.replica, nonce=stranger.nonce))

    def _greet(self, stranger: _Stranger) -> None:
        messages = stranger.channel.receive()
        if messages:
            hello = messages[0]
            if len(messages) == 1 and isinstance(hello, RankHello) and self._knows_token(stranger, hello):
                self._admit(stranger, hello)
                return
            self._drop_stranger(stranger)
        elif stranger.channel.broken:
            self._drop_stranger(stranger)

    def _knows_token(self, stranger: _Stranger, hello: RankHello) -> bool:
        return proved(self._settings.token, PURPOSE_HELLO, self._settings.job, stranger.nonce, hello.proof)

    def _admit(self, stranger: _Stranger, hello: RankHello) -> None:
        settings, rank = self._settings, hello.info.rank
        theirs = RankFacts(hello.plan, hello.state, hello.last_step, hello.data_plane)
        unfit = ""
        if hello.version != TEAM_VERSION:
            unfit = f"another version of ftctl (protocol {hello.version}, here {TEAM_VERSION})"
        elif (hello.job, hello.replica) != (settings.job, settings.replica):
            mine = f"{settings.job}/{settings.replica}"
            unfit = f"this is the leader of {mine}, not of {hello.job}/{hello.replica}"
        elif hello.world_size != settings.world_size:
            unfit = f"rank {rank} has WORLD_SIZE={hello.world_size}, rank 0 has {settings.world_size}"
        elif not 0 < rank < settings.world_size:
            unfit = f"rank {rank} is not one of 1 to {settings.world_size - 1}"
        else:
            unfit = self._misfit = misfit(self._facts, theirs, rank)
        channel = stranger.channel
        if unfit:
            proof = prove(settings.token, PURPOSE_REFUSED, settings.job, hello.nonce)
            channel.send(TeamRefused(reason=unfit, hint="start all ranks of a replica alike", proof=proof))
            self._drop_stranger(stranger)
            return
        self._strangers.remove(stranger)
        older = self.ranks.pop(rank, None)
        if older is not None:  # its first connection broke, or two processes have one number: the later one counts
            self._selector.unregister(older.channel.sock)
            older.channel.close()
        channel.parser.limit = FRAME_LIMIT
        self.ranks[rank] = TeamRank(channel, hello)
        self._selector.modify(channel.sock, selectors.EVENT_READ, lambda mask: self._ready(rank, mask))
        host = self._host if is_near(channel.sock) else ""
        channel.send(TeamWelcome(proof=prove(settings.token, PURPOSE_WELCOME, settings.job, hello.nonce), host=host))

    def _drop_stranger(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.channel.sock)
        stranger.channel.close()


def listen(settings: Settings) -> tuple[list[socket.socket], Address]:
    """Where the leader listens (TCP first, then the Unix socket, if there can be one), and the address for the other
    ranks: FTAR_LEADER if it is set; else MASTER_ADDR, which is rank 0's host, with a port of the kernel's choice; else
    the first rail. Raises SettingsError."""
    places: list[tuple[str, int, str]] = []  # bind host, port, host to tell
    if settings.leader is not None:
        places.append((settings.leader.host, settings.leader.port, settings.leader.host))
    else:
        if settings.master is not None:
            # A name may mean a loopback address here and another one elsewhere.
            bound = settings.master.host if _is_number(settings.master.host) else ""
            places.append((bound, 0, settings.master.host))
        places.append((settings.rails[0].address, 0, settings.rails[0].address))
    problem = ""
    for host, port, told in places:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            address, backlog = Address(told, sock.getsockname()[1]), MAX_STRANGERS + settings.world_size
            near = listen_near(address, backlog)  # first: nobody on this node is to find the port alone
            try:
                sock.listen(backlog)
            except OSError:
                if near is not None:
                    near.close()
                raise
            return [sock, near] if near is not None else [sock], address
        except OSError as error:
            sock.close()
            problem = f"{Address(host, port)}: {error.strerror or error}"
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                break
    raise SettingsError(
        f"rank 0 cannot listen for the other ranks of {settings.replica}: {problem}",
        hint="correct MASTER_ADDR, or set FTAR_LEADER=HOST:PORT (an address of rank 0) for all ranks",
    )


def _reachable(bound: str) -> str:
    """An address at which this node itself reaches a socket that is bound so."""
    number = ipaddress.ip_address(bound)
    if not number.is_unspecified:
        return bound
    return "127.0.0.1" if number.version == 4 else "::1"


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
