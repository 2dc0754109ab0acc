"""The helper's own audit log: STATE/audit.jsonl, root's, one line a request for a change, carried out or turned away.

The agent keeps one as well, but whoever has taken the agent over can write that as they like. What stands here was
written by the process that made the change, about what it was asked, by which process and user. The form is that of the
agents' log (agents/api/audit.py). `who` is the principal that the agent names, `source` the process that asked, as the
kernel says. A line is written before the request is answered; on a full disk lines wait in memory, the newest WAITING.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from agents.auditfile import append
from agents.helper import wire

WAITING = 1000
MAX_TEXT = 500


class HelperAudit:
    """Thread-safe. `complain` hears when lines cannot be written, once until they can."""

    def __init__(self, path: Path, node: str, complain: Callable[[str], None]) -> None:
        self._path, self._node, self._complain = path, node, complain
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque(maxlen=WAITING)
        self._trouble = ""

    def answered(self, request: wire.AnyRequest, reply: wire.AnyReply, caller: tuple[int, int], took_s: float) -> None:
        """`caller`: pid and user. What changes nothing is left out. Never raises."""
        match request:
            case wire.Inject():
                said = ("inject", request.nic or request.replica, request.owner, request.reason, _asks(request))
            case wire.Revert(name, why):
                said = ("revert", name, "", why, {})
            case wire.RevertAll(why):
                said = ("revert-all", "", "", why, {})
            case _:
                return
        action, target, who, why, asks = said
        result, detail = _outcome(reply)
        self._add(caller, action, target, who, why, asks, result, detail, took_s)

    def turned_away(self, caller: tuple[int, int], why: str) -> None:
        self._add(caller, "connect", "", "", "", {}, "refused", why, 0.0)

    def _add(  # noqa: PLR0917
        self,
        caller: tuple[int, int],
        action: str,
        target: str,
        who: str,
        why: str,
        asks: dict[str, Any],
        result: str,
        detail: str,
        took_s: float,
    ) -> None:
        pid, uid = caller
        record = {
            "time": time.time() - took_s,
            "node": self._node,
            "who": who,
            "source": f"process {pid} of user {uid}",
            "action": action,
            "target": target,
            "why": " ".join(why.split())[:MAX_TEXT],
            "asks": asks,
            "result": result,
            "detail": detail[:MAX_TEXT],
            "ms": round(took_s * 1000.0, 1),
        }
        with self._lock:
            self._waiting.append(msgspec.json.encode(record) + b"\n")
            try:
                while self._waiting:
                    append(self._path, self._waiting[0])
                    self._waiting.popleft()
                self._trouble = ""
            except OSError as error:
                text = f"{self._path}: {error.strerror or error}"
                if text != self._trouble:
                    self._trouble = text
                    self._complain(f"the audit log cannot be written: {text}")


def _asks(wish: wire.Inject) -> dict[str, Any]:
    """What is wished, with the processes that the agent named; short, and without what was not given."""
    found: dict[str, Any] = {
        "kind": wish.kind,
        "duration_s": wish.duration_s,
        "rank": wish.rank,
        "dry_run": wish.dry_run,
        "allow_last_rail": wish.allow_last_rail,
        "allow_last_replica": wish.allow_last_replica,
        "pids": [worker.pid for worker in wish.workers[:16]],
        "coordinator": wish.coordinator.pid if wish.coordinator is not None else None,
        **{f"with.{name}": value for name, value in wish.params.items()},
    }
    return {name: value for name, value in found.items() if value not in (None, False, [], -1)}


def _outcome(reply: wire.AnyReply) -> tuple[str, str]:
    match reply:
        case wire.Refused():
            named = f"{reply.fault.entry.id}: " if reply.fault is not None else ""
            return reply.code, f"{named}{reply.reason}"
        case wire.One():
            return "ok", _named(reply.fault)
        case wire.Several():
            return "ok", ", ".join(_named(one) for one in reply.faults)
    return "ok", ""


def _named(fault: wire.Fault) -> str:
    return f"{fault.entry.id} {fault.entry.state.value}"
