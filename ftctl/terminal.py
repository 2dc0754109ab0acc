"""A terminal that gives single keys, and is given back as it was, however the view in it ends."""

from __future__ import annotations

import contextlib
import os
import termios
import tty
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def single_keys(stream: TextIO) -> Iterator[int | None]:
    """The descriptor to read keys from, without echo and without waiting for Enter; None where there is no terminal to
    read from. Ctrl-C stays a signal; Ctrl-Z does nothing, for a suspended view would leave its screen behind."""
    try:
        handle = stream.fileno()
        before = termios.tcgetattr(handle)
    except (OSError, ValueError, termios.error):
        yield None
        return
    tty.setcbreak(handle, termios.TCSADRAIN)
    now = termios.tcgetattr(handle)
    now[6][termios.VSUSP] = b"\0"
    termios.tcsetattr(handle, termios.TCSADRAIN, now)
    try:
        yield handle
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(handle, termios.TCSADRAIN, before)


def keys(handle: int) -> str:
    """What was typed; at the end of input, as q."""
    try:
        return os.read(handle, 64).decode("ascii", "ignore") or "q"
    except OSError:
        return "q"
