"""One process that uses the plugin as NCCL would, driven by JSON lines: see `Peer` in rig.py for the commands.

argv: path of the plugin, ABI version.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from native.nccl.abi import Plugin, PluginError
from native.nccl.streams import Receiver, Sender, Stream

MOST_LINES = 4000


class Talker(Plugin):
    """Keeps the newest lines only, also of a plugin that refuses to start, and counts how often the data of a
    connection went over to another rail."""

    moves = 0
    heard: ClassVar[list[str]] = []

    def _said(self, *about: Any) -> None:
        super()._said(*about)
        Talker.heard = self.lines
        self.moves += "carries the data" in self.lines[-1]
        if len(self.lines) >= MOST_LINES:
            del self.lines[: MOST_LINES // 2]


class Session:
    def __init__(self, plugin: Talker) -> None:
        self.plugin = plugin
        self.streams: list[Stream] = []
        self.named: dict[str, Stream] = {}  # those that come and go
        self.words: dict[int, tuple[Any, int]] = {}  # by connection: a message of eight bytes and its request

    def answer(self, q: dict[str, Any]) -> Any:
        do = q["do"]
        if do == "devices":
            return self.plugin.devices()
        if do == "names":
            return [self.plugin.properties(i).name.decode() for i in range(self.plugin.devices())]
        if do == "listen":
            comm, handle = self.plugin.listen(q["device"])
            return [comm, handle.hex()]
        if do == "connect":
            return self.plugin.connect(q["device"], bytes.fromhex(q["handle"]))
        if do == "accept":
            return self.plugin.try_accept(q["listener"])
        if do in {"send", "receive"}:
            kind = Sender if do == "send" else Receiver
            stream = kind(
                self.plugin, q["comm"], q["stream"], q["sizes"], q["count"], q["window"], q.get("pause_s", 0.0)
            )
            if "name" in q:
                self.named[q["name"]] = stream
            else:
                self.streams.append(stream)
            stream.start()
            return len(self.streams) - 1
        if do == "state":
            return [state(s) for s in self.streams]
        if do == "state-of":
            return state(self.named[q["name"]])
        if do == "halt":  # as stop and abandon, for one and without waiting
            named = self.named[q["name"]]
            named.stop, named.abandon = True, q["abandon"]
            return None
        if do == "halt-senders":
            for s in self.streams:
                s.stop = s.stop or isinstance(s, Sender)
            return None
        if do == "flying":  # requests of each sender that are not done
            return [len(s.flying) for s in self.streams if isinstance(s, Sender)]
        if do == "untouched":
            return [s.untouched() for s in self.streams if isinstance(s, Receiver)]
        if do == "say":  # a number, so that the other side knows which connection of one handle this is
            word = np.array([q["number"]], np.uint64)
            self.words[q["comm"]] = (word, self.plugin.isend(q["comm"], word.ctypes.data, 8))
            return None
        if do == "listen-for":
            word = np.zeros(1, np.uint64)
            self.words[q["comm"]] = (word, self.plugin.irecv(q["comm"], word.ctypes.data, 8))
            return None
        if do == "word":  # None: not yet
            word, request = self.words[q["comm"]]
            if self.plugin.test(request) is None:
                return None
            del self.words[q["comm"]]
            return int(word[0])
        if do in {"stop", "abandon"}:
            for s in self.streams:
                s.stop, s.abandon = True, do == "abandon"
            for s in self.streams:
                s.join(60)
            return [s.is_alive() for s in self.streams]
        if do == "close":
            getattr(self.plugin, f"close_{q['kind']}")(q["comm"])
            for s in self.streams:
                if s.comm == q["comm"]:
                    s.buffers = []  # gone at once, as NCCL's would be
            for name in [name for name, s in self.named.items() if s.comm == q["comm"]]:
                del self.named[name]
            return None
        if do == "forget":
            self.streams.clear()
            return None
        if do == "fork":
            return forked()
        if do == "finalize":
            self.plugin.close()
            return None
        if do == "log":
            return self.plugin.lines
        if do == "moves":
            return self.plugin.moves
        if do == "links":
            return links()
        if do == "resources":
            return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]
        raise ValueError(do)


def links() -> list[dict[str, Any]]:
    """The rails of all links, as this process tells whoever asks."""
    with socket.socket(socket.AF_UNIX) as status:
        status.connect(f"\0ftar-links/{os.getpid()}/0")
        text = b""
        while part := status.recv(1 << 16):
            text += part
    return [rail for link in json.loads(text)["links"] for rail in link["rails"]]


def forked() -> int:
    """A child that does nothing, like the worker of a data loader."""
    if pid := os.fork():
        return pid
    time.sleep(600)
    os._exit(0)


def state(s: Stream) -> dict[str, Any]:
    """How far it is; the longest gap between two messages is since the last question."""
    longest, s.longest_s = s.longest_s, 0.0
    about = {"done": s.done, "bytes": s.bytes, "code": s.code, "error": s.error, "longest_s": longest}
    return {**about, "alive": s.is_alive()}


def main() -> None:
    try:
        plugin = Talker(Path(sys.argv[1]), int(sys.argv[2]))
    except PluginError as error:
        print(json.dumps({"code": error.code, "error": "; ".join(Talker.heard)}), flush=True)
        return
    print(json.dumps({"ok": "ready"}), flush=True)
    session = Session(plugin)
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = {"ok": session.answer(json.loads(line))}
        except PluginError as error:
            reply = {"code": error.code, "error": str(error)}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
