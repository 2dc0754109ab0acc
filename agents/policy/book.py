"""What an agent's policy has done and has not taken back: in memory, and on disk, so that a restart forgets nothing.

Times of acts are CLOCK_BOOTTIME and count only while the machine's boot is the same; who is out is out over reboots.
A record that cannot be read means the mode observe until somebody sets one, because what an operator wished is unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from agents.api.policyfile import MODES
from agents.policy.engine import Finding, Past
from agents.recovery.records import write_record

MAX_SEEN, MAX_ACTS, MAX_BYTES = 4096, 512, 1 << 20


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica that the policy took out because of `object` (kind and name of this node's)."""

    replica: str
    kind: str
    object: str
    incident: str
    action: str
    since: float  # Unix seconds
    cordoned: bool = False
    injected: bool = False


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    version: int = 1
    mode: str = ""  # as an operator has set it; empty: as configured
    by: str = ""
    since: float = 0.0
    boot_id: str = ""
    acts: list[tuple[float, str, str]] = []
    held: dict[str, Held] = {}


class PolicyBook:
    """One thread writes acts and held ones; the mode is set by any, under the caller's lock."""

    def __init__(self, path: Path, boot_id: str) -> None:
        self._path = path
        self._seen: deque[tuple[float, Finding]] = deque(maxlen=MAX_SEEN)
        self.trouble = ""
        self._record = self._read()
        if self._record.boot_id != boot_id:
            self._record.acts = []
        self._record.boot_id = boot_id

    def _read(self) -> _Record:
        try:
            with self._path.open("rb") as file:
                record = msgspec.json.decode(file.read(MAX_BYTES), type=_Record)
            if record.version == 1 and record.mode in ("", *MODES):
                return record
            self.trouble = f"{self._path}: version {record.version}, mode {record.mode!r} are not known"
        except FileNotFoundError:
            return _Record()
        except OSError as error:
            self.trouble = f"{self._path}: {error.strerror}"
        except (msgspec.DecodeError, ValueError):
            self.trouble = f"{self._path} is damaged"
        return _Record(mode="observe", by="unknown")

    @property
    def mode(self) -> str:
        """Empty: nobody has set one."""
        return self._record.mode

    @property
    def set_by(self) -> str:
        return self._record.by

    @property
    def set_since(self) -> float:
        return self._record.since

    @property
    def held(self) -> dict[str, Held]:
        return self._record.held

    def past(self, before: Finding | None = None) -> Past:
        """`before`: what was seen before this was seen last, for a finding that is judged again."""
        seen = tuple(self._seen)
        if before is not None:
            last = max((at for at, (_, one) in enumerate(seen) if one == before), default=len(seen))
            seen = seen[:last]
        return Past(seen, tuple(self._record.acts))

    def saw(self, now: float, finding: Finding) -> None:
        self._seen.append((now, finding))

    def acted(self, now: float, name: str, action: str) -> None:
        self._record.acts = [*self._record.acts, (now, name, action)][-MAX_ACTS:]

    def forget_acts(self) -> int:
        """An operator has looked: breakers close and cool-downs end."""
        count = len(self._record.acts)
        self._record.acts = []
        return count

    def hold(self, held: Held) -> None:
        self._record.held = {**self._record.held, held.replica: held}

    def release(self, replica: str) -> None:
        self._record.held = {name: one for name, one in self._record.held.items() if name != replica}

    def set_mode(self, mode: str, by: str, since: float) -> None:
        """Raises OSError: then it is as before."""
        before = self._record
        self._record = msgspec.structs.replace(before, mode=mode, by=by, since=since)
        try:
            self._write()
        except OSError:
            self._record = before
            raise

    def save(self, complain: Callable[[str], None]) -> None:
        """What cannot be written is still true in memory."""
        try:
            self._write()
            self.trouble = ""
        except OSError as error:
            text = f"{self._path}: {error.strerror}; what the policy did is known until its agent ends"
            if text != self.trouble:
                complain(text)
            self.trouble = text

    def _write(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_record(self._path, self._record)
