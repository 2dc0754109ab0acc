"""`ftctl watch`: what is on the screen, from recorded answers; and the terminal it is given, and gives back."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from agents.api import models as m
from ftctl.client.cluster import NodeAnswer, Snapshot
from ftctl.client.watching import EVENTS, POINTS, Picture
from ftctl.errors import AgentUnreachable, CliError
from ftctl.render.watch import Screen, sparkline

from .conftest import Run
from .fake_agent import FakeCluster
from .fake_job import event, replica

T0 = 1_790_000_000.0


def recorded(
    cluster: FakeCluster, at: float, *, step: int = 100, silent: tuple[str, ...] = (), coordinator: bool = True
) -> Snapshot:
    """A status document as agents send it: through JSON, at a time of our own."""
    nodes = []
    for name, agent in cluster.agents.items():
        if name in silent:
            nodes.append(NodeAnswer(name, None, AgentUnreachable(name, "no answer within 3s")))
            continue
        view = m.NodeView.model_validate(json.loads(agent.view().model_dump_json(by_alias=True)))
        speed = [rank.model_copy(update={"tokens_per_s": 1000.0}) for rank in view.ranks]
        nodes.append(NodeAnswer(name, view.model_copy(update={"ranks": speed}), None))
    assert cluster.job is not None
    job = m.JobState.model_validate_json(cluster.job.view().model_copy(update={"step": step}).model_dump_json())
    trouble = None if coordinator else CliError("coordinator of job main", "nobody listens there")
    return Snapshot(at, "main", tuple(nodes), job if coordinator else None, trouble)


def drawn(picture: Picture, now: float, width: int = 120, height: int = 40, *, colour: bool = False) -> str:
    console = Console(
        file=io.StringIO(), record=True, width=width, height=height, force_terminal=True, color_system="standard",
        highlight=False, markup=False, emoji=False, _environ={},
    )  # fmt: skip
    console.print(Screen(picture, now), end="")
    return console.export_text(styles=colour)


@pytest.fixture
def quiet(folder: Path) -> FakeCluster:
    """Never started: only its documents are used."""
    return FakeCluster(folder)


def test_replicas_rails_faults_curves_and_events_are_on_one_screen(quiet: FakeCluster) -> None:
    picture = Picture()
    quiet["node1"].faults = [
        quiet["node1"].fault("node1/rail0", m.InjectRequest(kind="link-down", nic="rail0", reason="a drill"))
    ]
    for second in range(30):
        picture.see(recorded(quiet, T0 + second, step=100 + 5 * second))
    picture.heard(event(1, "coordinator", "replica.joined", "r2", "caught up"))
    screen = drawn(picture, T0 + 29)
    lines = screen.splitlines()
    assert len(lines) <= 40
    assert all(len(line) <= 120 for line in lines)
    assert "job main  running  step 245" in screen
    assert re.search(r"step time  *[▁-█]+ 200 ms, at most 201", screen)
    assert re.search(r"tokens/s  *[▁-█]+ 3,000, at most 3,000", screen)
    assert re.search(r"r1 +contributing +100 +1\.7 +node1 +2\.5000 +200 ms", screen)
    assert re.search(r"node1 +up +rail0 up 10G", screen)
    assert re.search(r"f-node1-0 +link-down +node1/rail0 +active", screen)
    assert "replica.joined" in screen
    assert lines[-1].startswith("q or Ctrl-C ends")


def test_colour_says_what_is_well_what_is_meant_and_what_needs_hands(quiet: FakeCluster) -> None:
    assert quiet.job is not None
    quiet.job.set("r1", "drained", reason="new firmware")
    quiet.job.set("r2", "evicted", reason="silent")
    picture = Picture()
    picture.see(recorded(quiet, T0, silent=("node2",)))
    screen = drawn(picture, T0, colour=True)
    assert "\x1b[32mcontributing" in screen
    assert "\x1b[33mdrained" in screen
    assert "\x1b[31mevicted" in screen
    assert re.search(r"\x1b\[31munreachable since \d\d:\d\d:\d\d", screen)
    plain = drawn(picture, T0)
    assert plain.index("r1  ") < plain.index("r0  "), "what does not contribute comes first"
    assert plain.index("node2  ") < plain.index("node0  ")


def test_what_others_have_written_does_not_move_the_cursor(quiet: FakeCluster) -> None:
    evil = "x\x1b[2Jall is well\rnode1 \x9b2K\u202ellaf\x07"
    quiet["node1"].faults = [
        quiet["node1"].fault("node1/rail0", m.InjectRequest(kind="link-down", nic="rail0", reason=evil))
    ]
    picture = Picture()
    picture.see(recorded(quiet, T0))
    picture.heard(event(1, "coordinator", "replica.joined", "r2", evil))
    screen = drawn(picture, T0, width=200)
    assert screen.count("all is well") == 2
    assert not set("\x1b\r\x9b\x07\u202e") & set(screen), ascii(screen)


def test_who_goes_away_is_unreachable_since_then_and_the_rest_goes_on(quiet: FakeCluster) -> None:
    picture = Picture()
    picture.see(recorded(quiet, T0))
    for second in (1, 2, 63):
        picture.see(recorded(quiet, T0 + second, silent=("node1",), coordinator=False))
    since = time.strftime("%H:%M:%S", time.localtime(T0 + 1))
    screen = drawn(picture, T0 + 63)
    assert f"unreachable since {since} (1m2s)" in screen
    assert f"coordinator unreachable since {since} (1m2s)  last known: step 100  epoch 1.7" in screen
    assert "nobody listens there" in screen
    picture.see(recorded(quiet, T0 + 64))
    assert "unreachable" not in drawn(picture, T0 + 64)
    picture.missed("agents: every one is silent")
    assert "as of 36s ago: agents: every one is silent" in drawn(picture, T0 + 100)


def test_a_stall_is_seen_in_the_curve_while_it_lasts(quiet: FakeCluster) -> None:
    picture = Picture()
    for second, step in ((0, 100), (1, 105), (2, 110), (3, 110), (4, 110), (5, 115)):
        picture.see(recorded(quiet, T0 + second, step=step))
    assert list(picture.step_ms.points) == [201.0, 200.0, 200.0, 1000.0, 2000.0, 600.0]
    picture.see(recorded(quiet, T0 + 6, step=50))  # begun again from a checkpoint
    assert picture.step_ms.last() == 201.0


@pytest.mark.parametrize(("width", "height"), [(200, 60), (100, 24), (80, 24), (60, 12), (40, 6), (20, 3), (10, 1)])
def test_any_size_is_filled_and_never_left(quiet: FakeCluster, width: int, height: int) -> None:
    assert quiet.job is not None
    quiet.job.replicas |= {f"r{i}": replica(f"r{i}", "node0") for i in range(3, 300)}
    picture = Picture()
    picture.see(recorded(quiet, T0, silent=("node1",)))
    for number in range(50):
        picture.heard(event(number + 1, "node0", "rail.down", "node0/rail0", "x" * 500))
    lines = drawn(picture, T0, width, height).splitlines()
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    if height >= 24:
        assert "more replicas" in "\n".join(lines)
        assert "unreachable since" in "\n".join(lines)


def test_memory_is_bounded(quiet: FakeCluster) -> None:
    picture = Picture()
    look = recorded(quiet, T0)
    for number in range(3 * POINTS):
        picture.see(look)
        picture.heard(event(number, "node0", "x.y", "z"))
    assert (len(picture.step_ms.points), len(picture.events)) == (POINTS, EVENTS)


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, None, 4]) == "▁▃▅ █"
    assert sparkline([5, 5, 5]) == "███"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == sparkline([None, None]).strip() == ""
    assert sparkline([1, 4], plain=True) == ".#" or sparkline([1, 4], plain=True).isascii()


def test_without_a_terminal_it_says_what_to_use_instead(ftctl: Run) -> None:
    for words in ((), ("-o", "json"), ("--interval", "soon")):
        wrong = ftctl("watch", *words)
        assert (wrong.code, wrong.out) == (2, "")
        assert wrong.err.startswith("error: ")
    assert "next:  ftctl status --watch" in ftctl("watch").err


class Screenful:
    """`ftctl watch` in a terminal of its own."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.master, self._slave = pty.openpty()
        self.resize(30, 110)
        self.before = termios.tcgetattr(self._slave)
        self.text = ""
        environ = {**os.environ, "TERM": "xterm-256color", "FTCTL_INVENTORY": str(cluster.inventory)}
        environ.pop("COLUMNS", None)
        environ.pop("LINES", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ftctl", "watch", "--interval", "200ms", "--timeout", "1s"],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env=environ,
            start_new_session=True,
        )

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, pattern: str, within_s: float = 90.0) -> str:
        """What was written since the last call, once the pattern is in it."""
        deadline = time.monotonic() + within_s
        while not re.search(pattern, self.text, re.DOTALL):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text[-2000:]!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.text += os.read(self.master, 65536).decode("utf-8", "replace")
        found, self.text = self.text, ""
        return found

    def ended(self) -> int:
        """The exit code; the terminal is as it was."""
        tail = self.until(r"\x1b\[\?1049l.*\x1b\[\?25h|\x1b\[\?25h.*\x1b\[\?1049l")
        code = self.process.wait(90)
        assert termios.tcgetattr(self._slave) == self.before
        assert "Traceback" not in tail
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        os.close(self.master)
        os.close(self._slave)


@pytest.fixture
def screen(cluster: FakeCluster) -> Iterator[Screenful]:
    shown = Screenful(cluster)
    yield shown
    shown.close()


def test_it_lives_through_a_dead_agent_and_a_new_size_and_q_gives_the_terminal_back(
    screen: Screenful, cluster: FakeCluster
) -> None:
    screen.until(r"\x1b\[\?1049h.*node1.*q or Ctrl-C ends")
    cluster["node1"].stop()
    screen.until(r"unreachable since \d\d:\d\d:\d\d")
    cluster.job = None
    screen.until(r"coordinator unreachable since")
    screen.resize(12, 70)
    os.killpg(screen.process.pid, signal.SIGWINCH)
    time.sleep(0.5)
    screen.text = ""
    small = screen.until(r"\x1b\[H.*q or Ctrl-C ends")
    rows = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", small.rpartition("\x1b[H")[2]).replace("\r", "").split("\n")
    assert len(rows) <= 12
    assert all(len(row) <= 70 for row in rows)
    os.write(screen.master, b"\x1a")  # Ctrl-Z does not leave the screen behind
    os.write(screen.master, b"q")
    assert screen.ended() == 0


@pytest.mark.parametrize(("how", "code"), [(b"\x03", 130), (signal.SIGTERM, 0)])
def test_ctrl_c_and_a_kill_give_the_terminal_back(screen: Screenful, how: bytes | signal.Signals, code: int) -> None:
    screen.until(r"q or Ctrl-C ends")
    if isinstance(how, bytes):
        # The terminal is not its controlling one here: the signal is what the terminal would send.
        os.kill(screen.process.pid, signal.SIGINT)
    else:
        os.kill(screen.process.pid, how)
    assert screen.ended() == code
