"""Starts agents for tests without the second that their imports take: a process that has them imported, and forks.

One JSON line a start on stdin; one line with the agent's pid on stdout. It ends at the end of stdin. With the argument
`--ends` it is also asked how agents have ended: {"ended": pid}, of one that has, is answered with its exit code, as
subprocess tells it.

What is forked is an agent as `ft-agent` is one: a process in a session of its own, with default signals, in the network
namespace that it is told, that runs agents.daemon.main.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import traceback
from typing import Any

from agents import daemon

CLONE_NEWNET = 0x40000000


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if "--ends" not in sys.argv:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    gc.freeze()
    for line in sys.stdin:
        wish = json.loads(line)
        if "ended" in wish:
            print(os.waitstatus_to_exitcode(os.waitpid(wish["ended"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become(libc, wish)
        print(pid, flush=True)


def _become(libc: ctypes.CDLL, wish: dict[str, Any]) -> None:
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        namespace = os.open(wish["namespace"], os.O_RDONLY | os.O_CLOEXEC)
        if libc.setns(namespace, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
        null = os.open(os.devnull, os.O_RDWR)
        log = os.open(wish["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for number, source in enumerate((null, log, log)):
            os.dup2(source, number)
        os.chdir("/")
        if "environment" in wish:
            os.environ.clear()
            os.environ.update(wish["environment"])
        arguments = wish.get("arguments", ["--allow-faults", "--stop-replicas"])
        sys.argv = ["ft-agent", "--config", wish["config"], *arguments]
        daemon.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
