"""What an operator ordered of a node and has not taken back: who, why and since when, in a small file.

A record that cannot be read counts as an order: asking once whether it is still meant costs less than doing what
somebody forbade. Without a path (a simulated node) nothing is on disk, and the order ends with its process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from agents.recovery.records import write_record

MAX_RECORD_BYTES = 64 * 1024
MAX_REASON = 500


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    by: str
    reason: str
    since: float
    version: int = 1


Order_co = TypeVar("Order_co", covariant=True)


class Made(Protocol[Order_co]):
    def __call__(self, *, by: str, reason: str, since: float) -> Order_co: ...


def one_line(reason: str) -> str:
    return " ".join(reason.split())[:MAX_REASON]


def read(path: Path | None, made: Made[Order_co]) -> Order_co | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            record = msgspec.json.decode(file.read(MAX_RECORD_BYTES), type=_Record)
    except FileNotFoundError:
        return None
    except OSError as error:
        return made(by="unknown", reason=f"its record cannot be read: {words(error)}", since=_age(path))
    except (msgspec.DecodeError, ValueError):
        return made(by="unknown", reason=f"its record {path} is damaged", since=_age(path))
    return made(by=record.by, reason=record.reason, since=record.since)


def write(path: Path | None, by: str, reason: str, since: float) -> None:
    """On disk when it returns. Raises OSError."""
    if path is None:
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_record(path, _Record(by, reason, since))


def remove(path: Path | None) -> None:
    """Gone from the disk when it returns. Raises OSError."""
    if path is None:
        return
    path.unlink(missing_ok=True)
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def words(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
