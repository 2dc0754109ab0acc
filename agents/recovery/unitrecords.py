"""What a unit keeps on disk: its own state, and what its fork server wrote about its lives and their ends.

What was decided is in state.json before it is acted upon, so that the next agent decides the same. On a full disk it is
acted upon all the same (an operator's stop must work then too), and `unrecorded` says so once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from agents.recovery.records import Exit, Life, State, read_record, write_record
from agents.settings import Supervised


class UnitRecords:
    """`unrecorded` is called with the reason when the state could not be written, until it is written again."""

    def __init__(self, directory: Path, state: State, unrecorded: Callable[[str], None]) -> None:
        self.directory = directory
        self.state = state
        self._unrecorded = unrecorded
        self._disk_full = False

    def recover(self) -> bool:
        """Take the state that an earlier agent left; False if there is none. Raises OSError."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        saved = read_record(self.directory / "state.json", State)
        if saved is not None:
            self.state = saved
        return saved is not None

    def change(self, **fields: object) -> None:
        changed = msgspec.structs.replace(self.state, **fields)
        if changed == self.state:
            return
        self.state = changed
        try:
            write_record(self.directory / "state.json", self.state)
            self._disk_full = False
        except OSError as error:
            if not self._disk_full:
                text = f"{self.directory}: {error.strerror}: what is decided now is forgotten if the agent ends"
                self._unrecorded(text)
            self._disk_full = True

    def life(self) -> Life | None:
        """The last life that a fork server started."""
        return read_record(self.directory / "life.json", Life)

    def end_of(self, life: Life) -> Exit | None:
        end = read_record(self.directory / "exit.json", Exit)
        return end if end is not None and (end.life, end.pid) == (life.life, life.pid) else None


def fingerprint(spec: Supervised) -> str:
    """Of what a life is started with; another one is another configuration's."""
    text = msgspec.json.encode([spec.module, spec.args, sorted(spec.env.items())])
    return hashlib.blake2b(text, digest_size=16).hexdigest()
