"""Files in which other monitors write what they found, looked at about once a second.

A file holds what POST /v1/verdicts takes, as JSON: {"source": "gpud", "verdicts": [...]}, all that its monitor has to
say at that time, and is best replaced by rename. What is not in it any more is taken back, everything with the file
itself. A file that nobody writes any more gets old: its verdicts are forgotten after their `ttl_s`, as those of the
API are.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from agents.api.health import VerdictsRequest
from agents.health.desk import HealthDesk
from agents.health.foreign import Foreigners, ForeignProblem

MAX_BYTES = 512 * 1024
POLL_S = 1.0

_Print = tuple[int, int, int]  # inode, size, time of change (ns)


class _Unusable(Exception):
    pass


class VerdictFiles:
    def __init__(self, paths: Sequence[Path], desk: HealthDesk, foreigners: Foreigners, poll_s: float = POLL_S) -> None:
        self._files = [_File(path, desk, foreigners) for path in paths]
        self._poll_s = poll_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verdict-files", daemon=True)

    def start(self) -> None:
        if self._files:
            self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(self._poll_s + 2)

    def _run(self) -> None:
        while True:
            for file in self._files:
                file.look()
            if self._end.wait(self._poll_s):
                return


class _File:
    def __init__(self, path: Path, desk: HealthDesk, foreigners: Foreigners) -> None:
        self._path = path
        self._desk = desk
        self._foreigners = foreigners
        self._seen: _Print | None = None
        self._source = ""

    def look(self) -> None:
        try:
            data = self._changed()
            if data is None:
                return
            said = VerdictsRequest.model_validate_json(data)
            self._foreigners.take(said.model_copy(update={"complete": True}))
            if said.source != self._source:
                self._take_back()
            self._source = said.source
        except FileNotFoundError:
            self._seen = None
            self._take_back()
            self._note("there is no such file", ok=True)
        except (OSError, _Unusable, ForeignProblem) as error:
            self._note(str(error.strerror if isinstance(error, OSError) else error))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            self._note(f"{where}: {first['msg']}" if where else first["msg"])
        else:
            self._note("", ok=True)

    def _changed(self) -> bytes | None:
        """The file's bytes, if it is not the one that was read last."""
        handle = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            there = os.fstat(handle)
            if not stat.S_ISREG(there.st_mode):
                raise _Unusable("not a plain file")
            seen = (there.st_ino, there.st_size, there.st_mtime_ns)
            if seen == self._seen:
                return None
            self._seen = seen
            if there.st_size > MAX_BYTES:
                raise _Unusable(f"more than {MAX_BYTES} bytes")
            with os.fdopen(os.dup(handle), "rb") as file:
                return file.read(MAX_BYTES)
        finally:
            os.close(handle)

    def _take_back(self) -> None:
        if self._source:
            self._foreigners.take(VerdictsRequest(source=self._source, verdicts=[], complete=True))
            self._source = ""

    def _note(self, text: str, *, ok: bool = False) -> None:
        self._desk.monitor(f"verdicts of {self._path}", ok=ok, note=text[:300])
