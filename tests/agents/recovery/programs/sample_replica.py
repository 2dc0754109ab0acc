"""A replica that does one thing and shows it: the pre-imported module of the supervision tests."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

IMPORTED_BY = os.getpid()  # the fork server's pid in a forked replica


def _facts(path: str) -> None:
    stdin = os.readlink("/proc/self/fd/0")
    facts = {
        "pid": os.getpid(),
        "imported_by": IMPORTED_BY,
        "session": os.getsid(0),
        "argv": sys.argv,
        "name": __name__,
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "stdin": stdin,
        "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "sigterm_is_default": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "random": random.random(),
        "numpy_random": float(sys.modules["numpy.random"].random()) if "numpy.random" in sys.modules else None,
        "comm": Path("/proc/self/comm").read_text(encoding="ascii").strip(),
    }
    temporary = Path(path + ".new")
    temporary.write_text(json.dumps(facts), encoding="utf-8")
    temporary.rename(path)


def main(argv: list[str]) -> int | str | None:
    action, *rest = argv
    if action == "facts":
        _facts(rest[0])
        return 0
    if action == "sleep":
        print("asleep")
        time.sleep(600)
    if action == "exit":
        print(f"leaving with {rest[0]}")
        return int(rest[0])
    if action == "exit-from-file":  # the code changes from life to life; "sleep" stays
        code = Path(rest[0]).read_text(encoding="ascii").strip()
        print(f"told to {code}")
        if code == "sleep":
            time.sleep(600)
        return int(code)
    if action == "say":
        return "could not open the data: no such directory"
    if action == "raise":
        print("\x1b[31mabout to divide\x1b[0m")
        return 1 // 0
    if action == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("not listening")
        time.sleep(600)
    if action == "polite":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(rest[0])))
        print("listening")
        time.sleep(600)
    if action == "family":  # leaves a child of its own behind
        child = subprocess.Popen(["sleep", "600"])
        Path(rest[0]).write_text(str(child.pid), encoding="ascii")
        if rest[1] == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if action == "segfault":
        ctypes.string_at(0)
    raise SystemExit(f"no such action: {action}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
