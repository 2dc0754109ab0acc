"""Ctrl-C, SIGTERM and a closed terminal while a lab is made or removed.

While making: all three mean "stop", as a KeyboardInterrupt, so that what was begun is taken back by the code that
began it.
While taking back: none is heard, because half a teardown is worth less than two more seconds of patience.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """As Ctrl-C does it, so that an event loop that handles SIGINT its own way (asyncio.run) handles this too."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.raise_signal(signal.SIGINT)
    else:
        raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does."""
    with _handlers(dict.fromkeys((signal.SIGTERM, signal.SIGHUP), _interrupt)):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP are ignored."""
    with _handlers(dict.fromkeys(ENDING, signal.SIG_IGN)):
        yield


@contextmanager
def _handlers(wanted: dict[signal.Signals, signal._HANDLER]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
