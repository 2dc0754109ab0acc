"""The first messages of a connection to the coordinator.

They prove knowledge of the job token without sending it (HMAC-SHA256 challenge and response, both ways):

    coordinator -> Challenge(nonce, term, proof of both)
    peer        -> [Knock,] Hello | OpHello (client_nonce, proof of the challenge)   or  Outdated (this term is old)
    coordinator -> Welcome (proof of client_nonce)                          or  Refused (with a proof)
"""

from __future__ import annotations

import msgspec

from ftar_core.wire.ids import Term
from ftar_core.wire.membership import RankInfo, Report
from ftar_core.wire.part import Message

PROTOCOL_VERSION = 1


class Challenge(Message, frozen=True):
    """`proof` binds the term to the job token (codec.vouch), because a member promises itself to the term before it
    hears more: a stranger on the port must not be able to make up a term that no coordinator ever reaches."""

    job: str
    nonce: bytes
    term: Term
    proof: bytes = b""
    version: int = PROTOCOL_VERSION


class Knock(Message, frozen=True):
    """Before a Hello longer than a stranger may send (64 KiB: hundreds of ranks, several rails): here is the proof."""

    job: str
    proof: bytes
    version: int = PROTOCOL_VERSION


class Hello(Message, frozen=True):
    """A replica's leader presents itself. `incarnation` 0 asks for a new one."""

    job: str
    replica: str
    incarnation: int
    ranks: tuple[RankInfo, ...]
    plan: str  # hash of the canonical bucket plan
    report: Report
    client_nonce: bytes
    proof: bytes
    version: int = PROTOCOL_VERSION
    last_step: int = 0  # the training script wants to end after this step; 0 = no wish
    software: dict[str, str] = msgspec.field(default_factory=dict)  # package -> version, where all must have the same


class OpHello(Message, frozen=True):
    """An operator's connection (an agent on behalf of `principal`)."""

    job: str
    principal: str
    client_nonce: bytes
    proof: bytes
    version: int = PROTOCOL_VERSION


class Outdated(Message, frozen=True):
    """The member has promised itself to a newer term: a coordinator that gets this exits (rule EXITREF)."""

    promised: Term
    proof: bytes


class Welcome(Message, frozen=True):
    term: Term
    incarnation: int
    proof: bytes
    cookie: bytes = b""  # 16 bytes; names this connection in heartbeats
    heartbeat_port: int = 0
    heartbeat_interval_ms: int = 100
    coordinator_wait_s: float = 600.0  # how long a member waits for a lost coordinator


class Refused(Message, frozen=True):
    reason: str
    retry: bool  # False: starting again will not help
    hint: str = ""
    proof: bytes = b""  # of client_nonce, filled in by the service: a stranger on the port cannot end a running member
