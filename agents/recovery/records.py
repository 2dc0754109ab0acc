"""What supervision keeps on disk, and what agent and fork server say to each other.

Files under STATE/replicas/REPLICA/rankN/, each written whole (temporary file, fsync, rename, fsync of the directory),
so that a kill at any moment leaves the old or the new content:

| file | written by | holds |
|---|---|---|
| state.json | agent | what is wanted of the replica and what became of it: the next agent goes on from here |
| life.json | fork server, before the process may run | which process it is |
| exit.json | fork server, after reaping | how that process ended |
| log, log.1, log.2 | the process | stdout and stderr |

Messages are frames of ftar_core.wire.codec over the fork server's Unix socket, bounded like all others.
"""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import TypeVar

import msgspec

from ftar_core.wire.messages import Message
from ftar_core.wire.part import Part

PROTOCOL = 1
MESSAGE_LIMIT = 1024 * 1024  # an environment is the largest thing said; Linux allows 128 KiB a variable


class Life(Part, frozen=True):
    """One process. `life` counts the starts of a replica's rank; start_time is in ticks since boot (processes.py)."""

    life: int
    pid: int
    start_time: int
    boot_id: str
    server_pid: int
    server_start_time: int
    log_offset: int  # where in the log this life begins, bytes
    fresh: bool = False  # executed from scratch, since the pre-imported modules had started threads


class Exit(Part, frozen=True):
    """How a life ended: exit_code or signal. `ended` is in Unix seconds, `ended_boot_s` in seconds since boot."""

    life: int
    pid: int
    start_time: int
    exit_code: int | None
    signal: int | None
    ended: float
    ended_boot_s: float


class Outcome(str, Enum):
    """Why a replica that is wanted does not run. Anything else that ends is started again."""

    NONE = "none"
    FINISHED = "finished"
    FAILED = "failed"
    DRAINED = "drained"


class State(Part, frozen=True):
    wanted: bool
    outcome: Outcome = Outcome.NONE
    reason: str = ""
    life: int = 0  # the newest life asked for
    settled_life: int = 0  # the newest life whose end was dealt with
    starts: int = 0
    failures: int = 0
    exit_code: int | None = None
    spec: str = ""  # fingerprint of the configuration that `outcome` belongs to
    rejoined_life: int = 0  # the life that was asked to rejoin before it was gone: if it ends drained, it starts again


# --- agent -> fork server --------------------------------------------------------------------------------------------


class Spawn(Message, frozen=True):
    """Run `module` with `args` in a child process; `directory` gets life.json and exit.json, `log` its output."""

    name: str
    life: int
    module: str
    args: tuple[str, ...]
    env: dict[str, str]
    directory: str
    log: str
    cwd: str


class List(Message, frozen=True):
    pass


class Retire(Message, frozen=True):
    """Take no more requests, free the socket, exit once the last child has ended and its end is on disk."""


# --- fork server -> agent --------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """Said once on every connection, after the imports. `threads` > 1: children are executed from scratch."""

    protocol: int
    pid: int
    start_time: int
    python: str
    preload: tuple[str, ...]
    netns: int
    threads: int
    import_s: float
    problems: tuple[str, ...]


class Spawned(Message, frozen=True):
    """The answer to Spawn. Its life is another than the one asked for if the replica was running already."""

    name: str
    life: Life


class NotSpawned(Message, frozen=True):
    """`retiring`: this server starts nothing any more, another one should be asked."""

    name: str
    life: int
    reason: str
    retiring: bool = False


class Child(Part, frozen=True):
    name: str
    life: Life
    exit: Exit | None


class Children(Message, frozen=True):
    children: tuple[Child, ...]


ToServer = Spawn | List | Retire
FromServer = Ready | Spawned | NotSpawned | Children
to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)

T = TypeVar("T", bound=msgspec.Struct)


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Write it whole or not at all. Each file has one writer, so one temporary name will do. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_record(path: Path, kind: type[T]) -> T | None:
    """None if it is not there or cannot be read as one (an older version's, or damaged: as good as not there)."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MESSAGE_LIMIT), type=kind)
    except (OSError, msgspec.DecodeError, ValueError):
        return None


def netns_inode() -> int:
    """Names the network namespace of this process; 0 where there is none."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0
