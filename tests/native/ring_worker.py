"""One rank in a process of its own, driven by JSON lines: all-reduces without end, every result checked.

argv: name, incarnation, rails as JSON. In: {"members": ..., "me": ..., "count": ...} to start, {"ask": "links"},
{"ask": "state"}, {"ask": "events"}, {"ask": "stop"}. Out: {"endpoints": ...}, then one line per question.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import native  # noqa: F401  first: it may put another build in place
from ftar_core.native import core
from native.cluster import options, ring_sum

if TYPE_CHECKING:
    from ftar_core.native._core import Engine


def say(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 1)
        if not more:
            return b""
        line += more
    return line


class Stream:
    """Step after step; inputs change with the step, so that a late or doubled byte shows."""

    def __init__(self, engine: Engine, start: dict[str, Any]) -> None:
        self.engine, self.me, self.n = engine, int(start["me"]), len(start["members"])
        self.epoch = bytes.fromhex(start["epoch"])
        self.count, self.steps = int(start["count"]), 0
        self.pause_s, self.target = float(start["pause_s"]), 1 << 62
        self.longest_s, self.last = 0.0, time.monotonic()
        self.error = ""
        rng = np.random.default_rng(3)
        self.base = [rng.standard_normal(self.count).astype(np.float32) for _ in range(self.n)]
        engine.prepare(self.epoch, start["members"], self.me)
        engine.activate(self.epoch)
        self.busy = False
        self.next_at = 0.0

    def sources(self) -> list[Any]:
        return [np.roll(b, self.steps) for b in self.base]

    def submit(self) -> None:
        self.all = self.sources()
        self.dst = np.full(self.count, np.nan, np.float32)
        self.engine.submit(
            self.epoch, self.steps, 0, self.all[self.me].ctypes.data, self.dst.ctypes.data, self.count, 0
        )
        self.busy, self.last = True, time.monotonic()

    def reduced(self) -> None:
        self.longest_s = max(self.longest_s, time.monotonic() - self.last)
        if self.dst.tobytes() != ring_sum(self.all, "float32").tobytes():
            self.error = f"step {self.steps}: wrong result"
        self.steps += 1
        self.busy = False
        self.next_at = time.monotonic() + self.pause_s

    def turn(self) -> None:
        if not self.busy and not self.error and self.steps < self.target and time.monotonic() >= self.next_at:
            self.submit()


def forked(engine: Engine) -> int:
    """A child like the worker of a data loader, that takes apart what it inherited and lives on."""
    if pid := os.fork():
        return pid
    engine.close()
    try:
        engine.abort()
    except ValueError:
        time.sleep(600)
    os._exit(0)


def main() -> None:
    name, incarnation, rails = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    settings = json.loads(sys.argv[4])
    engine = core.Engine("job", b"secret", name, incarnation, [tuple(r) for r in rails], options(**settings))
    say({"endpoints": engine.endpoints()})
    # One line at a time and no buffer of Python's, or select() below would not see what is already read.
    start = json.loads(read_line())
    for member in start["members"]:
        member["rails"] = [tuple(r) for r in member["rails"]]
    stream = Stream(engine, start)
    events: list[dict[str, Any]] = []
    while True:
        stream.turn()
        ready, _, _ = select.select([engine.event_fd(), 0], [], [], 0.001 if not stream.busy else 1.0)
        if engine.event_fd() in ready:
            for event in engine.events():
                if event["type"] == "reduced":
                    stream.reduced()
                elif event["type"] == "failed":
                    stream.error = event["reason"]
                events.append({k: v.hex() if isinstance(v, bytes) else v for k, v in event.items()})
        if 0 in ready:
            line = read_line()
            if not line:
                return
            question = json.loads(line)
            if question["ask"] == "links":
                say(engine.links())
            elif question["ask"] == "events":
                say([e for e in events if e["type"] != "reduced"])
            elif question["ask"] == "fork":
                say({"pid": forked(engine)})
            elif question["ask"] == "stop-at":
                stream.target = question["step"]
                say({})
            elif question["ask"] == "stand-still":
                stream.target = stream.steps + stream.busy
                say({"steps": stream.target})
            else:
                say({"steps": stream.steps, "error": stream.error, "longest_s": stream.longest_s, "busy": stream.busy})
                stream.longest_s = 0.0
                if question["ask"] == "stop":
                    engine.close()
                    return


if __name__ == "__main__":
    main()
