"""What a process says of its links on its status socket: one JSON document, schema 2 (native/csrc/status_socket.h).

The names of the sockets, the document, and its one parser. Unknown keys are errors: whoever adds some says so by the
number of the schema.
"""

from __future__ import annotations

import re

import msgspec

from ftar_core.errors import WireError

SCHEMA = 2
KINDS = ("ring", "nccl")
STATES = ("DOWN", "SILENT", "PROBING", "HOLD", "UP")  # the worst first
MAX_BYTES = 4 * 2**20
_NAME = re.compile(r"@ftar-links/(\d{1,10})/(\d{1,3})\Z")


class _Part(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    pass


class Port(_Part, frozen=True):
    """A rail of the process. `device` is empty on loopback."""

    name: str
    device: str
    address: str
    carrier: bool


class Change(_Part, frozen=True):
    """Something that happened, to `links` connections within the document's merge_ms. `seq` counts from 1.

    kind: rail (its state), moved (data now goes over `rail`), dead (no rail works), back (one does again), unreachable
    (given up), over (the peer is gone). `peer`, `direction` (out | in) and `rail` are empty where there are several or
    none. detect_ms: from the last sign of life to the verdict; -1: there was none before.
    """

    seq: int
    age_s: float
    kind: str
    links: int
    peer: str
    direction: str
    rail: str
    from_: str = msgspec.field(name="from")
    to: str
    reason: str
    detect_ms: float


class LinkRail(_Part, frozen=True):
    """One rail of a connection; `rail` is an index of the document's rails, `address` the peer's.

    state: UP | DOWN | PROBING | HOLD | SILENT: UP or HOLD, since silence on all rails convicts none of them, but
    nothing has been heard for a second or more. detect_ms: how long the last loss took to notice; -1: there was none.
    """

    rail: int
    address: str
    state: str
    reason: str
    since_s: float
    flaps: int
    bytes: int
    active: bool
    hold_left_ms: float
    detect_ms: float
    retransmits: int


class Link(_Part, frozen=True):
    """A connection, with its rails in the order of preference. `peer` is the peer's `name`."""

    id: int
    peer: str
    direction: str
    resumes: int
    rails: tuple[LinkRail, ...]


class LinkStatus(_Part, frozen=True):
    """kind: ring | nccl. `rank` is its RANK, as text. `left_out`: links that found no room in the document."""

    schema: int
    pid: int
    kind: str
    job: str
    name: str
    rank: str
    age_s: float
    mode: str
    merge_ms: float
    rails: tuple[Port, ...]
    changes: tuple[Change, ...]
    links_total: int
    links: tuple[Link, ...]
    left_out: int


class _Version(msgspec.Struct):
    schema: int


_version = msgspec.json.Decoder(_Version)
_status = msgspec.json.Decoder(LinkStatus)


def pid_in(name: str) -> int | None:
    """The process id in the name of a socket as /proc/net/unix has it; None if it is no status socket."""
    match = _NAME.match(name)
    return int(match[1]) if match else None


def parse(data: bytes) -> LinkStatus:
    """Raises WireError for anything that is not a document of this schema."""
    if len(data) > MAX_BYTES:
        raise WireError(f"more than {MAX_BYTES} bytes")
    try:
        schema = _version.decode(data).schema
        if schema != SCHEMA:
            raise WireError(f"it speaks schema {schema} and this version knows {SCHEMA}: update the older of the two")
        status = _status.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"not a link status: {error}") from None
    except RecursionError:
        raise WireError("not a link status: nested too deep") from None
    if status.kind not in KINDS:
        raise WireError(f"not a link status: kind {status.kind!r}")
    if any(rail.state not in STATES for link in status.links for rail in link.rails):
        raise WireError("not a link status: a state that there is not")
    if any(not 0 <= rail.rail < len(status.rails) for link in status.links for rail in link.rails):
        raise WireError("not a link status: a rail that is not in its list")
    return status
