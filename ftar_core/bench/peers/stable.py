"""The process that all processes of all systems are forked from, with torch imported: a restart takes as long for
every system, and does not measure the import.

It reads {"start": ID, "role": ..., ...} as lines of JSON and answers {"pid": ...}; it says {"id": ID, "pid": ...,
"exit": CODE} of each that ends. When its parent ends, it and all of them are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from ftar_core.bench.orphan import end_with_parent

PRELOAD = ("torch._dynamo", "ftar_core.training.session", "ftar_core.coordinator.__main__")
PEERS = ("torchft.manager", "torchft.process_group", "torchft.coordination")
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000


def lighthouse(request: dict[str, Any]) -> int:
    """torchft's: a server in this process until it is killed. Its options as its command has them."""
    server = import_module("torchft.coordination").LighthouseServer(
        bind=f"0.0.0.0:{request['port']}", min_replicas=1, **request["options"]
    )
    Path(request["ready"]).write_text(server.address())
    while True:
        time.sleep(3600)


def coordinator(request: dict[str, Any]) -> int:
    return int(import_module("ftar_core.coordinator.__main__").main(request["arguments"]))


def replica(request: dict[str, Any]) -> int:
    trainers = import_module("ftar_core.bench.peers.trainers")
    plan = trainers.Plan(**request["plan"])
    os.environ.update(plan.environment)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    trainers.TRAINERS[plan.system](plan)
    return 0


def overhead(request: dict[str, Any]) -> int:
    import_module("ftar_core.bench.overhead_worker").work(request)
    return 0


def checkpoint(request: dict[str, Any]) -> int:
    import_module("ftar_core.bench.checkpoint_worker").work(request)
    return 0


ROLES = {
    "overhead": overhead,
    "checkpoint": checkpoint,
    "lighthouse": lighthouse,
    "coordinator": coordinator,
    "replica": replica,
}


def _child(request: dict[str, Any], stable: int) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        end_with_parent(stable)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for old, new in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(old, new)
        if request.get("network") is not None:
            _enter(request["network"], request["host"])
        code = ROLES[request["role"]](request)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        logging.exception("ends")
    finally:
        sys.stdout.flush()
        os._exit(code)


def _enter(network: int, host: str) -> None:
    """The replica's network; and a host name that is its address there, since peers tell each other host names."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(network, CLONE_NEWNET) != 0 or libc.unshare(CLONE_NEWUTS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    socket.sethostname(host)


def _reap(names: dict[int, str]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _say({"id": names.pop(pid, "?"), "pid": pid, "exit": os.waitstatus_to_exitcode(status)})


def _say(reply: dict[str, Any]) -> None:
    os.write(1, (json.dumps(reply) + "\n").encode())


def main(argv: list[str]) -> NoReturn:
    plan = json.loads(argv[0])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the benchmark's business; it ends this process
    end_with_parent(plan["parent"])
    for name in PRELOAD + (PEERS if find_spec("torchft") is not None else ()):
        import_module(name)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    me, names, waiting = os.getpid(), dict[int, str](), b""
    _say({"pid": me})
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 1 << 16)
            _reap(names)
        if 0 not in ready:
            continue
        more = os.read(0, 1 << 16)
        if not more:
            os._exit(0)
        *lines, waiting = (waiting + more).split(b"\n")
        for line in lines:
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _child(request, me)
            names[pid] = request["start"]
            _say({"started": request["start"], "pid": pid})


if __name__ == "__main__":
    main(sys.argv[1:])
