"""What happened at each step, as JSON lines: one file a replica (written by rank 0), appended over all its lives. The
other ranks of a replica write ranks/REPLICA.N.jsonl beside it, with what is their own: rails, digests, times.

Kinds: `data` (what is trained, and from where on), `start` and `end` of a life, `epoch` (membership entered), `rail` (a
rail of a link changed state), `step`. `batches` of a step that was not replayed: the number that each contributor
trained in it.
Times: `time` Unix seconds, `mono` and `t_*` CLOCK_MONOTONIC seconds (comparable between processes of one machine). A
line is one write of the whole line, so a killed process leaves at most one torn last line, which readers skip.

The journal serves people and reports; training does not depend on it. When it cannot be written (a full disk) that is
said once and training goes on; when there is room again it goes on too, with a line that counts what is missing."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger("ftar.session")
RANKS = "ranks"
CALM_STEPS = 20
MIN_CALM_STEPS = 5  # a median of fewer is chance

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class Journal:
    """Appends to DIRECTORY/REPLICA.jsonl, of a rank above 0 to DIRECTORY/ranks/REPLICA.RANK.jsonl; `directory` None:
    nowhere. Any thread may write."""

    def __init__(self, directory: Path | None, replica: str, rank: int = 0) -> None:
        self.path = directory / f"{replica}.jsonl" if directory is not None else None
        if directory is not None and rank > 0:
            self.path = directory / RANKS / f"{replica}.{rank}.jsonl"
        self._fd: int | None = None
        self._failed = 0
        self._torn = False
        self._lock = threading.Lock()

    def write(self, kind: str, fields: Mapping[str, Json]) -> None:
        if self.path is None:
            return
        with self._lock:
            self._write(self.path, {"kind": kind, "time": time.time(), "mono": time.monotonic(), **fields})

    def _write(self, path: Path, line: dict[str, Json]) -> None:
        if self._failed:
            line["lines_missing"] = self._failed
        data = (json.dumps({key: _finite(value) for key, value in line.items()}) + "\n").encode()
        try:
            if self._fd is None:
                if path.parent.name == RANKS:
                    path.parent.mkdir(exist_ok=True)
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                self._torn = not _ends_with_newline(path)
            whole = b"\n" + data if self._torn else data
            written = os.write(self._fd, whole)
            self._torn = written != len(whole)
            if self._torn:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if self._failed == 0:
                log.warning("%s cannot be written (%s): training goes on without it", path, error.strerror)
            self._failed += 1
            return
        if self._failed:
            log.warning("%s can be written again; %d lines are missing", path, self._failed)
            self._failed = 0

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"


def _finite(value: Json) -> Json:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class StallMeter:
    """Stall of a step = (commit - last gradient produced) minus the median of that over the last 20 calm steps, in ms.

    Calm: not retried, and in the same membership as the step before. Of this replica's own gradients: the coordinator,
    which hears of all, gives the job's view.
    """

    def __init__(self) -> None:
        self._calm: deque[float] = deque(maxlen=CALM_STEPS)

    def measure(self, produced: float, committed: float, *, calm: bool) -> float | None:
        """The stall in ms, at least 0; None while there are fewer than 5 calm steps to compare with."""
        waited = committed - produced
        stall_ms = None
        if len(self._calm) >= MIN_CALM_STEPS:
            stall_ms = max(0.0, (waited - statistics.median(self._calm)) * 1000.0)
        if calm:
            self._calm.append(waited)
        return stall_ms
