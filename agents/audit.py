"""The append-only log of requests for changes: STATE/audit.jsonl, one record a line, over restarts.

Only ever appended to; at 4 MiB it becomes audit.jsonl.1 in the place of an older one, so both together are bounded. A
record is written before the request is answered. It is not fsynced: a killed agent loses none, a power failure may. On
a full disk records wait in memory, the newest 1000, and are written when there is room; the answer says so meanwhile.
Nothing of a token gets here: what is kept of a request is its body, its path and the principal.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from pathlib import Path

from pydantic import ValidationError

from agents.api.audit import AuditAnswer, AuditRecord
from agents.auditfile import ROTATE_BYTES, append

WAITING = 1000
MAX_LINE = 16 * 1024


class AuditLog:
    """Thread-safe; blocks on the disk. Without a path (a simulated node) the last records are in memory only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._waiting: deque[AuditRecord] = deque(maxlen=WAITING)
        self._trouble = ""

    def add(self, record: AuditRecord) -> str:
        """Why it is not on disk; empty: it is. Never raises."""
        with self._lock:
            self._waiting.append(_writable(record))
            if self._path is None:
                return ""
            try:
                while self._waiting:
                    append(self._path, self._waiting[0].model_dump_json().encode() + b"\n", ROTATE_BYTES)
                    self._waiting.popleft()
            except OSError as error:
                self._trouble = f"{self._path}: {error.strerror or error}"
            else:
                self._trouble = ""
            return self._trouble

    def read(self, since: float, limit: int) -> AuditAnswer:
        """Records from `since` on, the newest `limit` of them. Lines that are no records (a power failure) are left
        out."""
        found: deque[AuditRecord] = deque(maxlen=limit)
        trouble = ""
        with self._lock:
            for path in (self._path.with_name(self._path.name + ".1"), self._path) if self._path else ():
                try:
                    with path.open("rb") as file:
                        while line := file.readline(MAX_LINE):
                            with contextlib.suppress(ValidationError):
                                record = AuditRecord.model_validate_json(line)
                                if record.time >= since:
                                    found.append(record)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    trouble = f"{path}: {error.strerror}"
            found.extend(record for record in self._waiting if record.time >= since)
            return AuditAnswer(records=list(found), trouble=self._trouble or trouble)


def _writable(record: AuditRecord) -> AuditRecord:
    """What a request says is kept also where it is refused, and may be no text that a file can hold; one such record
    must not be in the way of all later ones."""
    try:
        record.model_dump_json()
    except ValueError:
        text = json.dumps(record.model_dump(), ensure_ascii=False)
        return AuditRecord.model_validate_json(text.encode("utf-8", "replace"))
    return record
