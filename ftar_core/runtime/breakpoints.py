"""Where a process passes a named point (wire/breakpoints.py). Off, it is one comparison with None.

`install` is called once, at the start, with what FTAR_BREAKPOINTS says; a process without that variable can never be
armed, neither then nor later. What a point does it does in the thread that passes it.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

from ftar_core.wire.agentlink import ArmBreakpoints
from ftar_core.wire.breakpoints import Action, Spec, parse, rank_points

log = logging.getLogger("ftar.breakpoints")
SIGNALS = {Action.KILL: signal.SIGKILL, Action.STOP: signal.SIGSTOP}


class BreakpointHit(Exception):
    """action=raise."""


class Breakpoints:
    """Specs and how often each was passed. `rank`: of this process. `native(step, bucket, signal)` arms the point that
    the native core passes. Any thread may pass."""

    def __init__(self, rank: int = 0, native: Callable[[int, int, int], None] | None = None) -> None:
        self._rank, self._native = rank, native
        self._lock = threading.Lock()
        self.flip: Callable[[Spec], str] = lambda spec: "no bit was flipped: this process trains nothing (yet)"
        self._specs: list[tuple[Spec, list[int], float]] = []  # with how often it was passed, and until when it waits

    def arm(self, specs: Sequence[Spec], until_s: float = math.inf) -> None:
        """`until_s` (time.monotonic): forgotten then, or by `clear`; infinite: never."""
        with self._lock:
            for spec in specs:
                if spec.rank in (-1, self._rank):
                    log.warning("breakpoint armed: %s", spec.text())
                    if spec.point == "bucket" and self._native is not None:
                        self._native(spec.step, spec.bucket, SIGNALS[spec.action])
                    else:
                        self._specs.append((spec, [0], until_s))

    def clear(self) -> None:
        """Forget those that are not for ever."""
        with self._lock:
            self._specs = [one for one in self._specs if one[2] == math.inf]

    def waiting(self) -> int:
        """How many of those wait for their moment."""
        now = time.monotonic()
        with self._lock:
            return sum(now < until < math.inf and seen[0] < spec.skip + spec.count for spec, seen, until in self._specs)

    def passed(self, point: str, step: int, bucket: int) -> None:
        due: list[Spec] = []
        with self._lock:
            for spec, seen, until_s in self._specs:
                if until_s != math.inf and time.monotonic() >= until_s:
                    continue
                if spec.point == point and step >= spec.step and spec.bucket in (-1, bucket):
                    seen[0] += 1
                    if spec.skip < seen[0] <= spec.skip + spec.count:
                        due.append(spec)
        for spec in due:
            if spec.action is Action.FLIP:
                log.warning("breakpoint %s at step %d: %s", spec.point, step, self.flip(spec))
            else:
                _fail(spec, step)


def _fail(spec: Spec, step: int) -> None:
    log.warning("breakpoint %s at step %d: %s", spec.point, step, spec.action.value)
    if spec.action in SIGNALS:
        os.kill(os.getpid(), SIGNALS[spec.action])
    elif spec.action is Action.SLEEP:
        time.sleep(spec.ms / 1000.0)
    else:
        raise BreakpointHit(spec.text())


armed: Breakpoints | None = None


def install(breakpoints: Breakpoints | None) -> None:
    global armed
    armed = breakpoints


def passes(point: str, step: int = 0, bucket: int = -1) -> None:
    """This process is at that point of that step."""
    if armed is not None:
        armed.passed(point, step, bucket)


def arm_on_order(order: ArmBreakpoints) -> None:
    """What the agent asks for. A rank that was not started with FTAR_BREAKPOINTS has nothing to arm."""
    if armed is None:
        return
    until_s = time.monotonic() + order.for_ms / 1000.0 if order.for_ms > 0 else math.inf
    try:
        specs = parse(order.text, rank_points())
        if until_s != math.inf and any(spec.point == "bucket" for spec in specs):
            raise ValueError("bucket: the native thread cannot forget it")
        if order.clear:
            armed.clear()
        armed.arm(specs, until_s)
    except ValueError as error:
        log.warning("the agent asks for breakpoints that are not understood: %s", error)


def waiting() -> int:
    """Breakpoints that the agent has asked for, for a time, and that have not been reached."""
    return armed.waiting() if armed is not None else 0
