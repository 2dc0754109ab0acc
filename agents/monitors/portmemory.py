"""What is known of ports, in a file: counters and pasts survive the agent, and what happened while it was away is seen.

Ages count by the date, since no other clock goes over a reboot. A kernel counts from nothing after one, so counters
are of use in the same boot only; a port's past is of use always."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from agents.monitors.flaps import PortPast

SAVE_S = 30.0
MAX_BYTES = 1 << 20
MAX_PORTS = 256


class PortRecord(msgspec.Struct):
    """`identity`: of the device that counted; another one under the same name counts anew."""

    past: PortPast
    counters: dict[str, int] = {}
    identity: str = ""
    up: bool = False


class Known(msgspec.Struct):
    """Ports as they were `age_s` seconds ago, with times of the clock that is asked now."""

    ports: dict[str, PortRecord] = {}
    age_s: float = 0.0


class _File(msgspec.Struct):
    """`time`: Unix seconds; `now`: of the monitor's clock, at the same moment."""

    time: float
    now: float
    boot: str
    ports: dict[str, PortRecord]


class PortMemory:
    """One thread's."""

    def __init__(self, path: Path, boot: str = "") -> None:
        self._path = path
        self._boot = boot
        self._at = float("-inf")
        self._written: object = None

    def load(self, now: float, wall: float) -> Known:
        """Nothing of a file that is missing or damaged."""
        try:
            with self._path.open("rb") as file:
                saved = msgspec.json.decode(file.read(MAX_BYTES), type=_File)
        except (OSError, msgspec.DecodeError, ValueError, RecursionError):
            return Known()
        age_s = max(0.0, wall - saved.time)  # a date that was set back says nothing
        shift = now - saved.now - age_s
        ports = {
            name: PortRecord(
                record.past.shifted(shift),
                record.counters if saved.boot == self._boot else {},
                record.identity,
                record.up and saved.boot == self._boot,
            )
            for name, record in list(saved.ports.items())[:MAX_PORTS]
        }
        return Known(ports, age_s)

    def save(self, now: float, wall: float, ports: Mapping[str, PortRecord]) -> None:
        """Every SAVE_S seconds, and at once when a past is another one."""
        pasts = msgspec.json.encode({name: record.past for name, record in ports.items()})
        if now - self._at < SAVE_S and pasts == self._written:
            return
        self._at, self._written = now, pasts
        with contextlib.suppress(OSError):  # a full disk: then what happens between two lives is not seen
            fresh = self._path.with_suffix(".new")  # not synced: a monitor must not wait for a disk that is slow
            fresh.write_bytes(msgspec.json.encode(_File(wall, now, self._boot, dict(ports))))
            os.replace(fresh, self._path)
