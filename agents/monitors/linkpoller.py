"""The thread that asks the processes with links, about once a second. Requests read what it saw last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from agents.api.models import LinkProcessView, LinkRow
from agents.host import linksockets
from agents.host.errors import HostError
from agents.monitors.links import Counters, LinkBook, Told
from agents.node import Parts

Emit = Callable[..., None]
DEADLINE_S = 0.8  # for all processes together; a process itself drops a reader after 1 s


class LinkPoller:
    def __init__(self, parts: Parts, poll_s: float, emit: Emit) -> None:
        self._parts = parts
        self._poll_s = poll_s
        self._emit = emit
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._book = LinkBook(time.monotonic())
        self._views: list[LinkProcessView] = []
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(self._poll_s + DEADLINE_S + 2)

    def views(self) -> list[LinkProcessView]:
        """All processes with links, as they were at the last look."""
        return self._views

    def counters(self) -> Counters:
        with self._lock:
            known = self._book.counters
            return Counters(dict(known.bytes), dict(known.losses), dict(known.resumes))

    def rows(self, *, pid: int | None, rail: str, state: str, each: bool) -> list[LinkRow]:
        with self._lock:
            return self._book.rows(pid=pid, rail=rail, state=state, each=each)

    def _run(self) -> None:
        self._look()
        while not self._end.wait(self._poll_s):
            self._look()

    def _look(self) -> None:
        try:
            answers = linksockets.read_all(linksockets.find(), DEADLINE_S)
        except (HostError, OSError) as error:  # no descriptors left, for example: the next look may have some
            self._say_trouble(str(error))
            return
        self._trouble = ""
        now = time.monotonic()
        with self._lock:
            told = self._book.take(now, answers, linksockets.lives)
            self._views = self._book.views(now)
        if not told:
            return
        # A rank that registered tells its coordinator, which tells of its rails; its end is its supervisor's news.
        ranks = {rank.pid for rank in self._parts.ranks()}
        faults = self._parts.faults_by_nic()
        for one in told:
            if one.pid not in ranks:
                self._tell(one, faults)

    def _tell(self, told: Told, faults: dict[str, str]) -> None:
        node = self._parts.name
        thing = f"{node}/{told.rail}" if told.rail else node
        self._emit(told.kind, thing, told.reason, injected=told.rail in faults, age_s=told.age_s)

    def _say_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._emit("link.unreadable", self._parts.name, trouble)
