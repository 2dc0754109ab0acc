"""One process that uses the plugin as NCCL would, driven by JSON lines: see `Peer` in rig.py for the commands.

argv: path of the plugin, ABI version.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from native.nccl.abi import Plugin, PluginError
from native.nccl.streams import Receiver, Sender, Stream


class Session:
    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin
        self.streams: list[Stream] = []

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
            stream = kind(self.plugin, q["comm"], q["stream"], q["sizes"], q["count"], q["window"])
            self.streams.append(stream)
            stream.start()
            return len(self.streams) - 1
        if do == "state":
            out = []
            for s in self.streams:
                out.append(
                    {"done": s.done, "bytes": s.bytes, "code": s.code, "error": s.error, "longest_s": s.longest_s}
                )
                s.longest_s = 0.0
            return out
        if do in {"stop", "abandon"}:
            for s in self.streams:
                s.stop, s.abandon = True, do == "abandon"
            for s in self.streams:
                s.join(20)
            return [s.is_alive() for s in self.streams]
        if do == "close":
            getattr(self.plugin, f"close_{q['kind']}")(q["comm"])
            for s in self.streams:
                if s.comm == q["comm"]:
                    s.buffers = []  # gone at once, as NCCL's would be
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
        if do == "resources":
            return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]
        raise ValueError(do)


def forked() -> int:
    """A child that does nothing, like the worker of a data loader."""
    if pid := os.fork():
        return pid
    time.sleep(600)
    os._exit(0)


def main() -> None:
    try:
        plugin = Plugin(Path(sys.argv[1]), int(sys.argv[2]))
    except PluginError as error:
        print(json.dumps({"code": error.code}), flush=True)
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
