"""Ranks tell their agent where they are; strangers and junk cost nothing."""

from __future__ import annotations

import os
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.api.models import RankView
from agents.recovery import ranks
from agents.recovery.errors import SupervisionUnavailable
from agents.recovery.ranks import RankRegistry
from ftar_core.wire.agentlink import LinkReport, RankRegister, RankReport
from ftar_core.wire.codec import encode

from .conftest import wait_for


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RankRegistry]:
    registry = RankRegistry(tmp_path / "run" / "ranks.sock", "node1")
    registry.start()
    yield registry
    registry.close()


def connect(tmp_path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(90)
    sock.connect(str(tmp_path / "run" / "ranks.sock"))
    return sock


def register(replica: str = "r1", rank: int = 0) -> bytes:
    return encode(RankRegister(job="demo", replica=replica, rank=rank, pid=1, rails=("rail0", "rail1")))


LINK = LinkReport(
    peer="r2",
    rail="rail0",
    direction="out",
    state="UP",
    active=True,
    reason="",
    since_s=3.0,
    flaps=1,
    resumes=2,
    bytes=9,
)


def report(step: int) -> bytes:
    return encode(
        RankReport(
            state="contributing", step=step, term=1, epoch=4, contributors=("r1", "r2"), links=(LINK,), tokens_per_s=5.0
        )
    )


def one(registry: RankRegistry, **want: object) -> RankView:
    def check() -> RankView | None:
        found = registry.views()
        good = len(found) == 1 and all(getattr(found[0], name) == value for name, value in want.items())
        return found[0] if good else None

    view = wait_for(check, f"a rank with {want}")
    assert isinstance(view, RankView)
    return view


def closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_rank_registers_reports_and_goes(
    registry: RankRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "ranks.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with connect(tmp_path) as sock:
        sock.sendall(register())
        view = one(registry, state="starting")
        assert view.pid == os.getpid(), "the kernel's word, not the message's"
        for byte in report(41) + report(42):  # in the smallest pieces
            sock.sendall(bytes([byte]))
        view = one(registry, step=42)
        assert (view.job, view.replica, view.node, view.epoch) == ("demo", "r1", "node1", 4)
        assert view.contributors == ["r1", "r2"]
        assert (view.links[0].rail, view.links[0].resumes) == ("rail0", 2)
        assert 0 <= view.silent_s < 60
    gone = one(registry, state="gone")
    assert gone.step == 42
    assert gone.links == []
    monkeypatch.setattr(ranks, "GONE_S", 0.0)
    wait_for(lambda: registry.views() == [], "it to be forgotten")


def test_a_restarted_rank_takes_its_place_before_the_old_connection_is_closed(
    registry: RankRegistry, tmp_path: Path
) -> None:
    with connect(tmp_path) as old, connect(tmp_path) as new:
        old.sendall(register() + report(9))
        one(registry, step=9)
        new.sendall(register() + report(1))
        one(registry, step=1)
        old.sendall(report(10))  # a late word of the dead
        old.close()
        wait_for(lambda: len(registry._connections) == 1, "the old connection to be gone")
        one(registry, step=1, state="contributing")
        new.sendall(report(2))
        one(registry, step=2, state="contributing")


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 0),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        report(1),  # before it said who it is
        encode(RankRegister(job="demo", replica="../x", rank=0, pid=1, rails=())),
        encode(RankRegister(job="demo", replica="r1", rank=-1, pid=1, rails=())),
        register() + register(),
    ],
)
def test_junk_is_dropped_and_disturbs_nobody(registry: RankRegistry, tmp_path: Path, junk: bytes) -> None:
    with connect(tmp_path) as good, connect(tmp_path) as bad:
        good.sendall(register("r5") + report(1))
        bad.sendall(junk)
        assert closed(bad)
        good.sendall(report(2))
        wait_for(lambda: [v.step for v in registry.views() if v.replica == "r5"] == [2])


def test_silent_strangers_and_crowds(registry: RankRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "CONNECTIONS", 3)
    with connect(tmp_path) as good:
        good.sendall(register() + report(1))
        one(registry, step=1)
        with connect(tmp_path) as a, connect(tmp_path) as b, connect(tmp_path) as turned_away:
            assert closed(turned_away)
            monkeypatch.setattr(ranks, "HELLO_S", 0.1)
            assert closed(a)
            assert closed(b)
        good.sendall(report(2))
        one(registry, step=2)


def test_another_user_is_turned_away(registry: RankRegistry, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    for directory in (tmp_path / "run" / "ranks.sock", tmp_path / "run"):
        directory.chmod(0o777)  # as if the modes had been loosened: the kernel's word must still hold
    for directory in tmp_path.parents:
        if directory.owner() == "root" and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o011)
    tmp_path.chmod(0o711)
    script = (
        "import os,socket,sys\nos.setgid(65534); os.setuid(65534)\n"
        "s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.settimeout(90)\n"
        "sys.exit(0 if s.recv(1)==b'' else 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run" / "ranks.sock")], timeout=240, check=False
    )
    assert done.returncode == 0
    assert registry.views() == []


def test_a_socket_left_by_a_killed_agent_is_replaced_and_a_living_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "ranks.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()  # without unlink, as after SIGKILL
    registry = RankRegistry(path, "node1")
    registry.start()
    try:
        with pytest.raises(SupervisionUnavailable, match="another process listens there"):
            RankRegistry(path, "node1").start()
        assert path.exists()
    finally:
        registry.close()
    assert not path.exists()
    registry.close()  # twice is fine


def test_paths_that_cannot_be_a_socket(tmp_path: Path) -> None:
    with pytest.raises(SupervisionUnavailable, match="107 bytes"):
        RankRegistry(tmp_path / ("x" * 120), "node1").start()
    file = tmp_path / "file"
    file.write_text("precious", encoding="utf-8")
    with pytest.raises(SupervisionUnavailable, match="not a socket"):
        RankRegistry(file, "node1").start()
    assert file.read_text(encoding="utf-8") == "precious"
