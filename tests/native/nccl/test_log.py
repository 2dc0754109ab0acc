"""NCCL's logger may block for as long as it likes: the connections do not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from ftar_core.ncclenv import plugin_path

from .abi import Plugin, PluginError, pair


class Blocked(Plugin):
    """A plugin whose logger stands still while `go` is not set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        super().__init__(plugin_path(), 12)

    def _said(self, level: int, flags: int, file: bytes, line: int, form: bytes, text: bytes | None) -> None:
        self.go.wait()
        super()._said(level, flags, file, line, form, text)


@pytest.fixture
def blocked(loopback_rails: None) -> Iterator[Blocked]:
    made = Blocked()
    yield made
    made.go.set()
    made.close()


def transfer(plugin: Plugin, comms: tuple[int, int], value: int) -> None:
    data, into = np.full(100, value, np.uint8), np.zeros(100, np.uint8)
    sent = plugin.isend(comms[0], data.ctypes.data, 100)
    received = plugin.irecv(comms[1], into.ctypes.data, 100)
    plugin.wait(sent)
    plugin.wait(received)
    assert (into == value).all()


def close(plugin: Plugin, comms: tuple[int, int]) -> None:
    plugin.close_send(comms[0])
    plugin.close_receive(comms[1])


def test_a_blocked_logger_holds_up_nobody_and_gets_every_line(blocked: Blocked) -> None:
    blocked.go.clear()
    for round_ in range(10):
        comms = pair(blocked)
        transfer(blocked, comms, round_)
        close(blocked, comms)
    blocked.go.set()
    blocked.close()  # writes what is left
    ups = [line.split()[3] for line in blocked.lines if ": UP: " in line]
    # Every connection has had a rail at either end, and most had both by the time they were closed.
    assert ups.count("to") >= 10
    assert ups.count("from") >= 10
    assert not any("dropped" in line for line in blocked.lines)


def test_lines_beyond_the_bound_are_counted(blocked: Blocked) -> None:
    blocked.go.clear()
    made = 300  # at least two lines each, where 512 wait
    for _ in range(made):
        close(blocked, pair(blocked))
    blocked.go.set()
    with pytest.raises(PluginError):
        blocked.try_connect(0, bytes(128))
    lines = blocked.lines
    at = next(i for i, line in enumerate(lines) if "lines were dropped" in line)
    # In its place: behind what was kept, before what came afterwards.
    assert any("handle" in line for line in lines[at + 1 :])
    assert lines[at].startswith("2 ")
    dropped = int(lines[at].split("NET/FTAR : ")[1].split()[0])
    assert 0 < dropped < 5 * made
    assert sum(": UP: " in line for line in lines) < 4 * made
