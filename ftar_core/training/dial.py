"""How a shadow reaches a state server: over which rail, and with what proof."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ftar_core.errors import WireError
from ftar_core.runtime.rails import Rail
from ftar_core.training.stateconn import StateConnection, open_socket
from ftar_core.training.statewire import (
    PURPOSE_HELLO,
    PURPOSE_WELCOME,
    SILENCE_S,
    StateChallenge,
    StateHello,
    StateRefused,
    StateWelcome,
)
from ftar_core.wire.codec import nonce, prove, proved
from ftar_core.wire.messages import Endpoint, MemberInfo

CONNECT_S = 1.0


@dataclass(frozen=True)
class Identity:
    """Who asks, and of which rank."""

    job: str
    token: bytes
    replica: str
    incarnation: int
    rank: int = 0


class Refusal(Exception):
    """The source will not give its state, for good: another model, another token."""


@dataclass(frozen=True)
class Way:
    """One rail to a source."""

    rail: Rail | None
    endpoint: Endpoint


def ways_to(source: MemberInfo, rank: int, rails: Mapping[str, Rail]) -> list[Way]:
    info = source.at(rank)
    return [Way(rails.get(endpoint.rail), endpoint) for endpoint in info.state] if info is not None else []


def dial(who: Identity, way: Way, on_open: Callable[[StateConnection], None]) -> StateConnection:
    """Connect and prove each other's token. `on_open` is given the connection before anything that may take long, to
    shut it down from another thread. Raises OSError, WireError, Refusal; the connection is closed then."""
    endpoint = way.endpoint
    sock = open_socket(way.rail, socket.AF_INET6 if ":" in endpoint.addr else socket.AF_INET)
    try:
        sock.settimeout(CONNECT_S)
        if way.rail is not None:
            sock.bind((way.rail.address, 0))
        sock.connect((endpoint.addr, endpoint.port))
        connection = StateConnection(sock)
        on_open(connection)
        _handshake(connection, who)
    except BaseException:
        sock.close()
        raise
    return connection


def _handshake(connection: StateConnection, who: Identity) -> None:
    challenge = connection.receive()
    if not isinstance(challenge, StateChallenge) or challenge.job != who.job:
        raise WireError("not the state server of this job")
    mine = nonce()
    proof = prove(who.token, PURPOSE_HELLO, who.job, challenge.nonce)
    connection.send(StateHello(job=who.job, replica=who.replica, incarnation=who.incarnation, nonce=mine, proof=proof))
    welcome = connection.receive()
    if isinstance(welcome, StateRefused):
        raise Refusal(welcome.reason)
    if not isinstance(welcome, StateWelcome) or not proved(who.token, PURPOSE_WELCOME, who.job, mine, welcome.proof):
        raise WireError("it does not know the job token")
    connection.trust(SILENCE_S)
