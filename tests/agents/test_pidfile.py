"""One agent a state directory, and the next one at once after it is dead."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from live_agent import until

from agents.host import pidfile
from agents.host.pidfile import Taken, only_one, take
from agents.host.processes import on_its_way_out, read_stat

# Takes the lock, and then its first thread ends while another one sleeps: what a process of many threads looks like
# while it is torn down, but for as long as a test wants.
TORN_DOWN = """
import ctypes, os, platform, sys, threading, time
from pathlib import Path
from agents.host.pidfile import take
take(Path(sys.argv[1]))
threading.Thread(target=time.sleep, args=(1000,)).start()
print("locked", flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""
# Takes the lock, and leaves it with a child.
PARENT = """
import subprocess, sys
from pathlib import Path
from agents.host.pidfile import take
handle = take(Path(sys.argv[1]))
print(subprocess.Popen(["sleep", "1000"], pass_fds=(handle,), stdout=subprocess.DEVNULL).pid, flush=True)
"""


@contextmanager
def holder(code: str, path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process with the lock, and the line that it says then."""
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def test_one_that_lives_is_a_refusal_at_once(tmp_path: Path) -> None:
    asked: list[int] = []
    with only_one(tmp_path / "new" / "agent.pid"):
        with pytest.raises(Taken, match=str(os.getpid())) as caught:
            take(tmp_path / "new" / "agent.pid", lambda pid: bool(asked.append(pid)))
        assert asked == [os.getpid()]
        assert caught.value.why("agent") == f"another agent (pid {os.getpid()}) uses it"
    with only_one(tmp_path / "new" / "agent.pid"):
        pass


def test_the_next_one_waits_for_the_threads_of_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "agent.pid"
    with holder(TORN_DOWN, path) as (process, said):
        assert said == "locked"
        until(lambda: (stat := read_stat(process.pid)) is not None and stat.ended, "its first thread has ended")
        with path.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

        looks = 0

        def ended(pid: int) -> bool:
            nonlocal looks
            looks += 1
            if looks == 3:
                process.kill()
            return on_its_way_out(pid)

        os.close(take(path, ended))
        assert looks >= 3
    assert path.read_text() == f"{os.getpid()}\n"


def test_a_child_that_keeps_the_lock_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "agent.pid"
    with holder(PARENT, path) as (process, child):
        process.wait()
        monkeypatch.setattr(pidfile, "REMAINS_S", 0.05)
        try:
            with pytest.raises(Taken) as caught:
                take(path)
        finally:
            os.kill(int(child), signal.SIGKILL)
        assert "has ended" in caught.value.why("helper")
        assert f"fuser -v {path}" in caught.value.why("helper")
        monkeypatch.setattr(pidfile, "REMAINS_S", 60.0)
        os.close(take(path))


def test_whoever_is_quicker_has_it(tmp_path: Path) -> None:
    """Two wait for the remains of a dead one: the slower is told the quicker one's number."""
    path = tmp_path / "agent.pid"
    with only_one(path):
        path.write_text("4194305\n")  # nobody's: above the kernel's largest pid

        def ended(pid: int) -> bool:
            path.write_text(f"{os.getpid()}\n")
            return on_its_way_out(pid)

        with pytest.raises(Taken) as caught:
            take(path, ended)
        assert caught.value.pid == str(os.getpid())


def test_who_is_on_the_way_out() -> None:
    assert not on_its_way_out(os.getpid())
    child = subprocess.Popen(["sleep", "1000"])
    try:
        assert not on_its_way_out(child.pid)
        child.send_signal(signal.SIGSTOP)
        assert not on_its_way_out(child.pid)  # and a SIGKILL ends it nevertheless, in its own time:
        child.kill()
        assert on_its_way_out(child.pid)
    finally:
        child.kill()
        child.wait()
    assert on_its_way_out(child.pid)
