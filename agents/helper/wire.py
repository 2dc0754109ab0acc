"""What agent and helper say to each other: a request a connection, a reply, each a frame of ftar_core/wire/codec.py.

The seam is the life of a fault, not the system call. A helper that took "delete this route" or "signal that pid" would
have to trust its caller that the route is one that a fault took away. Here the agent can only ask for a fault of the
catalogue, for its end, and for what there is. What a fault changes, and what takes it back, is read from the system,
written down and carried out in the helper; nothing of an undo record ever leaves it or comes in.

With Inject go descriptors (SCM_RIGHTS, unix(7)), at most PROOFS: of the connections that the named processes made to
the agent when they registered. Whose the other end is the helper asks the kernel, so that a process which never came to
the agent cannot be passed off as a rank.

Every text has a bound, unknown fields are errors, and a request is at most REQUEST_LIMIT bytes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from agents.api.protect import MAX_RULES, Protection
from agents.host.workers import Worker
from agents.injection.ledger import Entry

VERSION = 2
REQUEST_LIMIT = 128 * 1024
REPLY_LIMIT = 8 * 2**20
LOOK_S = 10.0  # a Look is answered after so long even if nothing changed
PROOFS = 250
TAKES_S = 17.0  # anything else; the agent's own requests give up after 18 s

Name = Annotated[str, msgspec.Meta(max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=500)]
Whole = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
Value = bool | Whole | float | Text


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Elsewhere(Part, frozen=True):
    """An open fault that the agent keeps itself. It can only make the helper refuse more."""

    id: Name
    kind: Name
    nic: Name = ""
    left_s: float = 0.0
    replica: Name = ""
    rank: int = -1
    whole_node: bool = False


class JobSaid(Part, frozen=True):
    """What the coordinator told the agent (agents/injection/guard.py, JobFacts)."""

    known: bool = False
    contributing: Annotated[tuple[Name, ...], msgspec.Meta(max_length=4096)] = ()
    min_replicas: int = 0
    problem: Text = ""


class Protected(Part, frozen=True):
    """Rules of agents/api/protect.py. They can only make the helper refuse more."""

    source: Text
    nodes: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_RULES)] = ()
    nics: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_RULES)] = ()
    replicas: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_RULES)] = ()

    @classmethod
    def of(cls, rules: Protection) -> Protected:
        return cls(rules.source[:500], rules.nodes, rules.nics, rules.replicas)

    def rules(self) -> Protection:
        return Protection(self.nodes, self.nics, self.replicas, self.source)


class Request(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Inject(Request, frozen=True, kw_only=True):
    """As agents/injection/injector.py, Injection. `workers`: the training processes that the agent knows; each is
    checked again. `coordinator`: its process, where the fault is on that."""

    kind: Name
    owner: Name
    duration_s: float
    nic: Name = ""
    replica: Name = ""
    rank: int = -1
    reason: Text = ""
    params: Annotated[dict[Name, Value], msgspec.Meta(max_length=32)] = {}
    request_id: Name = ""
    dead_man_s: float | None = None
    allow_last_rail: bool = False
    allow_last_replica: bool = False
    dry_run: bool = False
    job: JobSaid = JobSaid()
    here: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1024)] = ()  # replicas with processes on the node
    protect: Annotated[tuple[Protected, ...], msgspec.Meta(max_length=8)] = ()
    workers: Annotated[tuple[Worker, ...], msgspec.Meta(max_length=1024)] = ()
    coordinator: Worker | None = None
    elsewhere: Annotated[tuple[Elsewhere, ...], msgspec.Meta(max_length=1000)] = ()


class Revert(Request, frozen=True):
    """By fault id or request id."""

    name: Name
    why: Text


class RevertAll(Request, frozen=True):
    why: Text


class KeepAlive(Request, frozen=True):
    name: Name


class Look(Request, frozen=True):
    """All faults there are; answered when they are no longer what `after` stood for, or after LOOK_S."""

    after: Name = ""
    after_event: int = 0


class Abilities(Request, frozen=True):
    """Which kinds of faults this helper takes, and what this machine lacks for them."""


class Reply(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Fault(Part, frozen=True):
    """The entry without its undo record, and what a person would do."""

    entry: Entry
    by_hand: tuple[str, ...]


class Event(Part, frozen=True):
    number: int
    kind: str
    object: str
    reason: str


class Damage(Part, frozen=True):
    path: str
    reason: str


class One(Reply, frozen=True):
    """`stamp`: CLOCK_BOOTTIME in ns when this was so; an earlier one says nothing about what came later."""

    stamp: int
    fault: Fault


class Several(Reply, frozen=True):
    stamp: int
    faults: tuple[Fault, ...]


class Faults(Reply, frozen=True):
    """The answer to Look. `boot` names the numbering of events, which begins at 1 with every helper."""

    stamp: int
    mark: str
    boot: str
    node: str
    faults: tuple[Fault, ...]
    damaged: tuple[Damage, ...]
    events: tuple[Event, ...]
    last_event: int


class Able(Reply, frozen=True):
    """Kind -> why not; empty: it can. `protect`: root's own rules, for people to see."""

    kinds: dict[str, str]
    protect: tuple[Protected, ...] = ()


class Refused(Reply, frozen=True):
    """As FaultProblem: `code` "in-force" means that it may still be in force."""

    code: str
    thing: str
    reason: str
    hint: str = ""
    fault: Fault | None = None


AnyRequest = Inject | Revert | RevertAll | KeepAlive | Look | Abilities
AnyReply = One | Several | Faults | Able | Refused


class Asked(Part, frozen=True):
    version: int
    request: AnyRequest


asked: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
reply: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)
_NOTHING = msgspec.Raw(msgspec.msgpack.encode(None))


def without_undo(entry: Entry) -> Entry:
    return msgspec.structs.replace(entry, undo=_NOTHING)
