"""The job that stands in for NCCL: its ranks meet, move bytes through the plugin and notice every wrong one."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ports import claim_port

from ftar_core.errors import SettingsError
from ftar_core.ncclabi import Plugin
from ftar_core.ncclrun.__main__ import read_place
from ftar_core.ncclrun.traffic import CANARY, SIZES, WINDOW, Counts, Incoming, Outgoing, Tape, size_of

from .abi import pair
from .rig import LOOPBACK

BESIDE = f"""
import runpy, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import native
runpy.run_module("ftar_core.ncclrun", run_name="__main__", alter_sys=True)
"""


class Ranks:
    def __init__(self, world: int, folder: Path, *arguments: str) -> None:
        self.port, self.folder = claim_port(), folder
        self.processes = [self.start(rank, world, *arguments) for rank in range(world)]

    def start(self, rank: int, world: int, *arguments: str) -> subprocess.Popen[str]:
        build = "FTAR_TEST_BUILD"
        env = {k: v for k, v in os.environ.items() if not k.startswith(("FTAR_", "NCCL_")) or k == build}
        env |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        argv = ["--rails", LOOPBACK, "--allow-sockets", "--report", str(self.folder / f"{rank}.json"), *arguments]
        # With a build under test the package of these tests is imported first, for it puts that build in its place.
        run = ["-c", BESIDE] if build in env else ["-m", "ftar_core.ncclrun"]
        return subprocess.Popen([sys.executable, *run, *argv], env=env, stderr=subprocess.PIPE, text=True)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def report(self, rank: int) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads((self.folder / f"{rank}.json").read_text())
        except FileNotFoundError:
            return {"messages_checked": 0}
        return document


def test_ranks_end_together_and_have_checked_every_byte(tmp_path: Path) -> None:
    with Ranks(3, tmp_path, "--rounds", "10", "--round-ms", "5") as ranks:
        stranger = socket.socket()  # connects before any rank, says nonsense, stays
        deadline = time.monotonic() + 90
        while stranger.connect_ex(("127.0.0.1", ranks.port)) != 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        stranger.send(b'{"rank": 1, "world": 99, "handles": {}}\n')
        said = [process.communicate(timeout=180)[1] for process in ranks.processes]
        stranger.close()
        assert [process.returncode for process in ranks.processes] == [0, 0, 0], said
        messages = 2 * 2 * 10 * len(SIZES)  # peers, channels, rounds
        for rank in range(3):
            report = ranks.report(rank)
            assert (report["messages_sent"], report["messages_checked"]) == (messages, messages)
            assert report["bytes_checked"] == 2 * 2 * 10 * sum(SIZES)
            assert (report["bytes_wrong"], report["state"]) == (0, "ended")


def test_when_a_rank_is_killed_the_others_ask_to_be_started_again(tmp_path: Path) -> None:
    with Ranks(2, tmp_path) as ranks:
        deadline = time.monotonic() + 90
        while ranks.report(1)["messages_checked"] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks.processes[0].send_signal(signal.SIGKILL)
        said = ranks.processes[1].communicate(timeout=180)[1]
        assert ranks.processes[1].returncode == 75, said
        assert "rank 0 has ended" in said or "a connection is over" in said
        assert "Traceback" not in said


def test_sigterm_is_a_good_end(tmp_path: Path) -> None:
    with Ranks(2, tmp_path) as ranks:
        deadline = time.monotonic() + 90
        while min(ranks.report(0)["messages_checked"], ranks.report(1)["messages_checked"]) == 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks.processes[1].send_signal(signal.SIGTERM)
        said = ranks.processes[1].communicate(timeout=180)[1]
        assert ranks.processes[1].returncode == 0, said
        assert " 0 wrong" in said


def test_wrong_late_and_overrun_bytes_are_noticed(plugin: Plugin) -> None:
    send, receive = pair(plugin)
    counts, tape = Counts(), Tape()
    outgoing, incoming = Outgoing(plugin, send, 3, tape, counts), Incoming(plugin, receive, 3, tape, counts)

    def move(messages: int) -> None:
        goal = incoming.done + messages
        outgoing.owed += messages
        deadline = time.monotonic() + 90
        while incoming.done < goal or outgoing.busy:
            assert time.monotonic() < deadline
            outgoing.pump(time.monotonic())
            incoming.pump()

    move(WINDOW)
    assert counts.bytes_wrong == 0
    assert counts.messages_checked == WINDOW
    outgoing.posted += 1  # the sender is one message ahead: all that it sends is another message
    move(1)
    assert counts.bytes_wrong > 0
    assert "message 8 of stream 3" in counts.first_wrong
    before = counts.bytes_wrong
    # A byte that comes late, into a buffer that was looked at and cleared: found when the buffer is used again.
    buffer = ctypes.addressof(incoming.memory) + (incoming.posted % WINDOW) * incoming.room
    assert ctypes.string_at(buffer, 1) == bytes([CANARY])
    ctypes.memset(buffer, 0, 1)
    incoming._look_clean(buffer, 16, 0, "after")
    assert counts.bytes_wrong == before + 1
    plugin.close_send(send)
    plugin.close_receive(receive)


def test_every_size_is_sent_on_every_connection() -> None:
    for stream in range(20):
        assert {size_of(stream, message) for message in range(len(SIZES))} == set(SIZES)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "x"}, "RANK=x"),
        ({"WORLD_SIZE": "1"}, "WORLD_SIZE=1"),
        ({"WORLD_SIZE": "1000"}, "WORLD_SIZE=1000"),
        ({"RANK": "2"}, "not below WORLD_SIZE"),
        ({"MASTER_PORT": ""}, "MASTER_PORT="),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_a_wrong_environment_is_one_line(change: dict[str, str], words: str) -> None:
    right = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7620"}
    assert read_place(right).world == 2
    with pytest.raises(SettingsError, match=words):
        read_place({**right, **change})


def test_settings_that_the_plugin_refuses_are_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTAR_NET_OPTIONS", "heartbeat=20")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    argv = [sys.executable, "-m", "ftar_core.ncclrun", "--rails", LOOPBACK, "--allow-sockets"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert "'heartbeat=20' is not NAME=VALUE with a name of: mode" in done.stderr
    assert "Traceback" not in done.stderr
