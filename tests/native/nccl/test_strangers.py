"""Handles that are none, secrets and tokens that are wrong, strangers on the port, settings that mean nothing: one
clear line each, and whoever is in order goes on."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from ftar_core.ncclenv import plugin_path

from .abi import HANDLE_BYTES, REMOTE, USAGE, Plugin, PluginError, pair
from .rig import Peer


@pytest.mark.parametrize("handle", ["zero", "random", "version", "cut", "port"])
def test_a_handle_that_is_none(plugin: Plugin, handle: str) -> None:
    listener, good = plugin.listen(0)
    bad = {
        "zero": bytes(HANDLE_BYTES),
        "random": os.urandom(HANDLE_BYTES),
        "version": good[:2] + b"\x63" + good[3:],
        "cut": good[:3] + b"\xff" + good[4:],
        "port": good[:44] + b"\0\0" + good[46:],
    }[handle]
    with pytest.raises(PluginError) as refused:
        plugin.try_connect(0, bad)
    assert refused.value.code == USAGE
    assert any("handle" in line for line in plugin.lines)
    plugin.close_send(plugin.try_connect(0, good))  # the listener is well
    plugin.close_listen(listener)


def test_a_wrong_secret_gets_nowhere_and_disturbs_nobody(impatient: None, plugin: Plugin) -> None:
    listener, good = plugin.listen(0)
    forged = good[:8] + os.urandom(16) + good[24:]
    stranger = plugin.connect(0, forged)
    byte = np.zeros(1, np.uint8)
    request = plugin.isend(stranger, byte.ctypes.data, 1)
    time.sleep(0.2)
    assert plugin.try_accept(listener) == 0
    friend = plugin.connect(0, good)
    receive = plugin.accept(listener)
    with pytest.raises(PluginError) as refused:
        plugin.wait(request, 90)
    assert refused.value.code == REMOTE
    for comm in (stranger, friend):
        plugin.close_send(comm)
    plugin.close_receive(receive)
    plugin.close_listen(listener)


def test_strangers_on_the_listening_port(plugin: Plugin) -> None:
    listener, handle = plugin.listen(0)
    port = int.from_bytes(handle[44:46], "little")
    crowd = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(20)]
    for s in crowd:
        s.sendall(b"GET / HTTP/1.1\r\n\r\n" * 40)
    send = plugin.connect(0, handle)
    receive = plugin.accept(listener)
    data = np.arange(1000, dtype=np.uint8)
    into = np.zeros(1000, np.uint8)
    sent, received = plugin.isend(send, data.ctypes.data, 1000), plugin.irecv(receive, into.ctypes.data, 1000)
    plugin.wait(sent)
    plugin.wait(received)
    assert (data == into).all()
    for s in crowd:
        s.close()
    plugin.close_send(send)
    plugin.close_receive(receive)
    plugin.close_listen(listener)


def test_a_token_file_replaces_the_secret_in_the_handle(tmp_path: Path) -> None:
    token, other = tmp_path / "token", tmp_path / "other"
    for path in (token, other):
        path.write_text(os.urandom(16).hex())
        path.chmod(0o600)
    with Peer(FTAR_TOKEN_FILE=str(token)) as a, Peer(FTAR_TOKEN_FILE=str(token)) as b, Peer() as none:
        listener, handle = a.ask("listen", device=0)
        assert bytes.fromhex(handle)[8:24] == bytes(16)
        b.ask("connect", device=0, handle=handle)
        deadline = time.monotonic() + 90
        while not a.ask("accept", listener=listener):
            assert time.monotonic() < deadline
        with pytest.raises(PluginError):
            none.ask("connect", device=0, handle=handle)
        assert any("FTAR_TOKEN_FILE" in line for line in none.ask("log"))
        with Peer(FTAR_TOKEN_FILE=str(other), FTAR_NET_TIMEOUT_S="1") as wrong:
            comm = wrong.ask("connect", device=0, handle=handle)
            wrong.ask("send", comm=comm, stream=0, sizes=[1], count=1, window=1)
            deadline = time.monotonic() + 90
            while not (code := wrong.ask("state")[0]["code"]):
                assert time.monotonic() < deadline
            assert code == REMOTE
            assert any("have both the same FTAR_TOKEN_FILE?" in line for line in wrong.ask("log"))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"FTAR_NET_RAILS": "nosuch0"}, "no network device 'nosuch0'"),
        ({"FTAR_NET_RAILS": "a=127.0.0.1,a=127.0.0.2"}, "named twice"),
        ({"FTAR_NET_RAILS": "a=203.0.113.7"}, "no device of this machine has the address"),
        ({"FTAR_NET_BACKUP": "rail0=rail9"}, "there is no rail 'rail9'"),
        ({"FTAR_NET_BACKUP": "rail0=rail0"}, "its own backup"),
        ({"FTAR_NET_TIMEOUT_S": "soon"}, "write seconds"),
        ({"FTAR_NET_OPTIONS": "hold_down=3"}, "'hold_down=3'"),
        ({"FTAR_NET_OPTIONS": "heartbeat_ms=0"}, "must be between"),
        ({"FTAR_NET_OPTIONS": "mode=strip"}, "mode is 'strip', but must be backup or stripe"),
        ({"FTAR_NET_RAIL": "rail0"}, "there is no such setting"),
        ({"FTAR_TOKEN_FILE": "/nonexistent/token"}, "No such file"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    lines: list[str] = []
    monkeypatch.setattr(Plugin, "lines", lines, raising=False)
    original = Plugin._said
    monkeypatch.setattr(Plugin, "_said", lambda self, *a: (original(self, *a), lines.extend(self.lines))[0])
    with pytest.raises(PluginError) as refused:
        Plugin(plugin_path(), 12)
    assert refused.value.code == USAGE
    assert any(words in line and line.startswith("2 ") for line in lines), lines


def test_one_rail_works_and_is_said_to_be_unprotected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTAR_NET_BACKUP", "none")
    plugin = Plugin(plugin_path(), 12)
    send, receive = pair(plugin, 1, 0)
    assert any("unprotected" in line for line in plugin.lines)
    plugin.close_send(send)
    plugin.close_receive(receive)
    plugin.close()
