"""Named points of a step at which a process can be made to fail, and the one parser of what is asked for there.

A recovery protocol is tested where it is weakest by failing exactly there: after the last bucket and before the commit,
between the record and the message. Kills at random times hit such a moment once in thousands, so processes pass named
points, and at one of them do what FTAR_BREAKPOINTS asks for (runtime/breakpoints.py). Without that variable nothing
can be asked for.

    FTAR_BREAKPOINTS='reduced,step=12'                          kill this process between the last bucket and the commit
    FTAR_BREAKPOINTS='serve,action=sleep,ms=300,count=5; update,step=40,action=raise'
    FTAR_BREAKPOINTS='after-record:new-epoch'                   of a coordinator
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from enum import Enum

from ftar_core.wire import messages

MAX_TEXT = 4096
MAX_SPECS = 32

# What a rank passes; the thread is the training thread unless another is named.
RANK_POINTS = {
    "forward": "a batch was dealt to this replica, the step begins",
    "backward": "the last gradient of a bucket is there, the bucket is not submitted yet",
    "bucket": "the middle of a bucket: own chunks are sent, the first has come (native I/O thread; NCCL: on the GPU)",
    "reduced": "all buckets of the step are reduced here, nobody was told",
    "done-sent": "this rank's word that the step is reduced was sent (control thread)",
    "commit-received": "the commit has arrived, the training thread does not know yet (control thread)",
    "update": "the step is committed, parameters are not changed yet",
    "updated": "the update has run, the next step was not begun",
    "epoch": "a new epoch was entered (control thread)",
    "join-prepare": "the links of an epoch to come are being connected (control thread)",
    "fetch": "catching up: a piece of a state has arrived (follower's thread)",
    "serve": "a piece of this replica's state was sent to one that catches up (state server's thread)",
    "replay": "catching up: a step that others committed is about to be applied",
    "promote": "caught up: the first step as a contributor begins",
    "checkpoint-copied": "the snapshot for a checkpoint is in host memory (checkpoint thread)",
    "checkpoint-write": "a tensor of a checkpoint is about to be written (checkpoint thread)",
    "checkpoint-joined": "all tensors of a checkpoint are on disk, its manifest is not (checkpoint thread)",
    "checkpoint-manifest": "the manifest is on disk, the directory has not got its name yet (checkpoint thread)",
    "checkpoint-published": "the checkpoint is complete, nobody was told (checkpoint thread)",
    "checkpoint-load": "a checkpoint is about to be read",
}


def kebab(message: type) -> str:
    """NewEpoch -> new-epoch"""
    return "".join("-" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(message.__name__))


def names_of(message: messages.Message) -> tuple[str, ...]:
    """What a message is called in a point: by its type, and a commit that says more also by that."""
    name = kebab(type(message))
    if isinstance(message, messages.Commit):
        if message.next is not None:
            return name, COMMIT_NEXT
        if message.last:
            return name, COMMIT_LAST
    return (name,)


COMMIT_NEXT, COMMIT_LAST = "commit-next", "commit-last"  # with a new membership; of the job's last step


_SENT = (
    messages.Welcome,
    messages.Refused,
    messages.Catchup,
    messages.Prepare,
    messages.PrepareCancel,
    messages.NewEpoch,
    messages.Commit,
    messages.Join,
    messages.Hold,
    messages.Evicted,
)
_HEARD = (
    messages.Hello,
    messages.Done,
    messages.Prepared,
    messages.CaughtUp,
    messages.Progress,
    messages.Unreachable,
    messages.Leaving,
    messages.OpRequest,
)
SENT = (*(kebab(m) for m in _SENT), COMMIT_NEXT, COMMIT_LAST)
HEARD = tuple(kebab(m) for m in _HEARD)
# With the name of the message (the first one behind the record that goes with it), or without for any.
COORDINATOR_POINTS = {
    "before-record": SENT,
    "after-record": SENT,
    "before-send": SENT,
    "after-send": SENT,
    "heard": HEARD,
}


class Action(Enum):
    KILL = "kill"  # SIGKILL to the own process
    STOP = "stop"  # SIGSTOP
    RAISE = "raise"  # an exception in the thread that passes
    SLEEP = "sleep"  # that thread sleeps for `ms`
    FLIP = "flip"  # one bit of this rank's memory, `where` and which by `seed`, has its other value from then on


class Where(Enum):
    """What a flip hits, and at which points it can: where the training thread has all of it."""

    REDUCED = "reduced"  # a reduced copy, before it is compared
    PARAMETER = "parameter"
    OPTIMIZER = "optimizer"  # what an optimizer keeps for a parameter


FLIP_POINTS = {
    Where.REDUCED: ("reduced",),
    Where.PARAMETER: ("forward", "updated"),
    Where.OPTIMIZER: ("forward", "updated"),
}


@dataclass(frozen=True)
class Spec:
    """`step`: at this step or the first time later (0: at any). `rank`, `bucket`: this one only (-1: any). `skip`: pass
    by so often before; `count`: fail so often."""

    point: str
    step: int = 0
    rank: int = -1
    bucket: int = -1
    action: Action = Action.KILL
    ms: int = 0
    skip: int = 0
    count: int = 1
    where: Where = Where.REDUCED
    seed: int = 0

    def text(self) -> str:
        parts = [self.point]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "point" and value != field.default:
                parts.append(f"{field.name}={value.value if isinstance(value, Enum) else value}")
        return ",".join(parts)


_NUMBERS = ("step", "rank", "bucket", "ms", "skip", "count", "seed")


def rank_points() -> tuple[str, ...]:
    return tuple(RANK_POINTS)


def coordinator_points() -> tuple[str, ...]:
    return tuple(
        name
        for point, names in COORDINATOR_POINTS.items()
        for name in (*((point,) if point != "heard" else ()), *(f"{point}:{message}" for message in names))
    )


def parse(text: str, points: tuple[str, ...]) -> tuple[Spec, ...]:
    """Specs separated by `;`. `allow` alone asks for nothing. Raises ValueError with one clear line."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"longer than {MAX_TEXT} characters")
    pieces = [piece.strip() for piece in text.split(";")]
    specs = tuple(_parse_one(piece, points) for piece in pieces if piece and piece != "allow")
    if len(specs) > MAX_SPECS:
        raise ValueError(f"{len(specs)} breakpoints, at most {MAX_SPECS} are taken")
    return specs


def _parse_one(text: str, points: tuple[str, ...]) -> Spec:
    point, *options = (part.strip() for part in text.split(","))
    if point not in points:
        near = difflib.get_close_matches(point, points, n=1, cutoff=0.6)
        raise ValueError(f"no point {point!r} here" + (f", did you mean {near[0]!r}?" if near else ""))
    action, where = Action.KILL, Where.REDUCED
    numbers: dict[str, int] = {}
    seen: set[str] = set()
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or name not in (*_NUMBERS, "action", "where"):
            raise ValueError(f"{point}: {option!r} is none of action=, {'=, '.join(_NUMBERS)}=, where=")
        if name in seen:
            raise ValueError(f"{point}: {name} is given twice")
        seen.add(name)
        if name == "action":
            action = _action(point, value)
        elif name == "where":
            where = _where(point, value)
        else:
            numbers[name] = _number(point, name, value)
    spec = Spec(point, action=action, where=where, **numbers)
    if action is Action.FLIP and point not in FLIP_POINTS[where]:
        raise ValueError(f"{point}: a flip in {where.value} is made at {' or '.join(FLIP_POINTS[where])}")
    if action is not Action.FLIP and {"where", "seed"} & seen:
        raise ValueError(f"{point}: where= and seed= go with action=flip")
    if (spec.action is Action.SLEEP) != (spec.ms > 0):
        raise ValueError(f"{point}: action=sleep and ms=N belong together")
    if spec.count < 1:
        raise ValueError(f"{point}: count must be at least 1")
    if spec.point == "bucket":
        if spec.action not in (Action.KILL, Action.STOP):
            raise ValueError(f"{point}: the native thread can only kill or stop its process")
        if spec.skip or spec.count != 1:
            raise ValueError(f"{point}: skip and count do not go with it")
    return spec


def _action(point: str, value: str) -> Action:
    try:
        return Action(value)
    except ValueError:
        raise ValueError(f"{point}: action {value!r} is none of {', '.join(a.value for a in Action)}") from None


def _where(point: str, value: str) -> Where:
    try:
        return Where(value)
    except ValueError:
        raise ValueError(f"{point}: where {value!r} is none of {', '.join(w.value for w in Where)}") from None


def _number(point: str, name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()) or len(value) > 12:
        raise ValueError(f"{point}: {name}={value!r} is no whole number of at least 0")
    return int(value)
