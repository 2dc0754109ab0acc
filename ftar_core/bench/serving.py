"""The other end of nodes.py: a process that does what a benchmark asks for, line by line of JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from ftar_core.bench.orphan import end_with_parent


def serve(parent: int, begin: Callable[[], object]) -> NoReturn:
    """Make a session with `begin`, call its methods as {"do": NAME, ARGUMENT: VALUE, ...} says, answer {"ok": RESULT}
    or {"error": TEXT}. Ends this process: with 1 if there is no session, else with the end of stdin or of `parent`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the benchmark's business; it ends this process
    end_with_parent(parent)
    try:
        session = begin()
    except Exception as error:  # noqa: BLE001  the benchmark tells it
        _say({"error": str(error)})
        _end(1)
    _say({"ok": None})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply: dict[str, Any] = {"ok": getattr(session, request.pop("do"))(**request)}
        except Exception as error:  # noqa: BLE001  whatever it was, the benchmark tells it
            reply = {"error": str(error) or repr(error)}
        _say(reply)
    _end(0)


def _say(reply: dict[str, Any]) -> None:
    print(json.dumps(reply), flush=True)


def _end(code: int) -> NoReturn:
    os._exit(code)  # a thread that still polls a connection must not hold up the end
