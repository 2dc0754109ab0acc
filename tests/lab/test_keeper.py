"""The keeper when things go wrong around it, without a network."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftctl.lab import keeper
from ftctl.lab.layout import LabOptions
from ftctl.lab.locks import LabBusy, locked
from ftctl.lab.manifest import KeeperState, Manifest, ProcessSpec, load, save
from ftctl.lab.paths import LabPaths

DEADLINE_S = 90.0


def a_keeper(paths: LabPaths, *children: keeper.Child) -> keeper.Keeper:
    manifest = Manifest(
        uuid="0123abcd-none", runtime_dir=str(paths.root / "none"), options=LabOptions(replicas=1), created=0
    )
    return keeper.Keeper(paths, manifest, list(children), wakeup=-1)


def test_a_full_disk_under_its_log_does_not_end_the_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent dies while the disk is full: the keeper has nowhere to say so, and starts it again all the same."""
    child = keeper.Child(ProcessSpec(name="agent", namespace="node0", argv=("true",), log=os.devnull))
    child.pid = os.posix_spawnp("true", ["true"], os.environ)
    child.started = time.monotonic()
    full = os.open("/dev/full", os.O_WRONLY)
    with open(full, "w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        kept = a_keeper(LabPaths(tmp_path), child)
        deadline = time.monotonic() + DEADLINE_S
        while not kept.reap(time.monotonic()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        monkeypatch.undo()
        assert child.start_at is not None, "it is to be started again"
        os.dup2(os.open(os.devnull, os.O_WRONLY), full)  # what is still in the buffer goes nowhere


def test_what_could_not_be_written_on_a_full_disk_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = a_keeper(LabPaths(tmp_path))
    kept.announced = True
    readable, writable = os.pipe()
    attempts = 0

    def full_twice(path: Path, value: object) -> None:
        nonlocal attempts
        attempts += 1
        if attempts <= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        save(path, value)
        os.write(writable, bytes([signal.SIGTERM]))  # as the handler of signals does: lab down

    def no_process(_uuid: str, _grace_s: float) -> None:
        pass

    kept.wakeup, kept.stdin_open = readable, False
    monkeypatch.setattr(keeper, "WRITE_AGAIN_S", 0.01)
    monkeypatch.setattr(keeper, "save", full_twice)
    monkeypatch.setattr(keeper, "end_all", no_process)
    kept.run()
    os.close(readable)
    os.close(writable)
    assert attempts >= 3
    assert not kept.unwritten
    assert load(kept.paths.keeper_state, KeeperState).pid == os.getpid()


def test_a_lab_whose_maker_was_killed_leaves_no_lock_behind(tmp_path: Path) -> None:
    paths = LabPaths(tmp_path / "lab")
    paths.root.mkdir()
    code = (
        "import os, sys; from pathlib import Path; from ftctl.lab.locks import locked; from ftctl.lab.paths import *\n"
        "with locked(LabPaths(Path(sys.argv[1]))): print('held', flush=True); sys.stdin.read()"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", code, str(paths.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "held\n"
        with pytest.raises(LabBusy), locked(paths):
            raise AssertionError
        maker.kill()
        maker.wait()
    assert (tmp_path / ".lab.lock").exists()
    kept = a_keeper(paths)
    kept.announced, kept.stdin_open = False, False
    kept.run()
    assert list(tmp_path.iterdir()) == []


def test_the_keeper_waits_for_the_lock_of_a_lab_up_that_is_dying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel closes a killed process's files one after the other: the pipe may tell before the lock is free."""
    paths = LabPaths(tmp_path / "lab")
    kept = a_keeper(paths)
    kept.announced, kept.stdin_open = False, False
    taken_down: list[LabPaths] = []
    monkeypatch.setattr(keeper.teardown, "take_down", taken_down.append)
    script = "import sys, time\nfrom pathlib import Path\nfrom ftctl.lab.locks import locked\n"
    script += "from ftctl.lab.paths import LabPaths\nwith locked(LabPaths(Path(sys.argv[1]))):\n"
    script += "    print('held', flush=True)\n    time.sleep(0.3)\n"
    dying = subprocess.Popen([sys.executable, "-c", script, str(paths.root)], stdout=subprocess.PIPE, text=True)
    assert dying.stdout is not None
    assert dying.stdout.readline() == "held\n"
    with pytest.raises(LabBusy), locked(paths):
        pass
    kept.run()
    dying.stdout.close()
    assert dying.wait(DEADLINE_S) == 0
    assert taken_down == [paths]
