"""What a forked replica process does before and while it is a training script.

It began as a copy of the fork server and has to become what `python -m MODULE ARGS` would be: a session of its own,
default signals, no descriptors but its own three, its own environment, random state that its siblings do not share, and
exit codes as Python gives them. Modules that the fork server imported stay imported; that is the point.

A module with a function `main` is called as `main(args)` (args without the program's name; `main()` if it takes
nothing) and its return value is the exit code, as for sys.exit. Other modules run under the name `__main__` (runpy).
Only the function way reuses a pre-imported MODULE itself; either way reuses what it imports.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import io
import os
import runpy
import signal
import sys
from types import TracebackType
from typing import Any

from agents.recovery.records import Spawn
from ftar_core.wire.exits import RankExit

# Frames that led to the script, which would only confuse in a traceback of the user's.
_OWN_FRAMES = (
    "agents/recovery/forkserver.py",
    "agents/recovery/child.py",
    "runpy.py",
    "<frozen runpy>",
    "importlib/__init__.py",
)


class Output(io.FileIO):
    """A log that a full disk cannot turn into the death of the training: what does not fit is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                return memoryview(data).nbytes
            raise


def become(request: Spawn, log: int) -> None:
    """Turn this process, with its signals still blocked, into the replica's. Raises OSError."""
    _default_signals()
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    _name_process(request.name)


def execute(request: Spawn) -> None:
    """Go on as a new interpreter: for a fork server whose imports started threads. Returns only by raising OSError."""
    os.execve(sys.executable, [sys.executable, "-m", request.module, *request.args], request.env)  # noqa: S606


def run_module(request: Spawn) -> object:
    """Run the training script to its end; what it returns is for sys.exit. Exceptions pass, SystemExit among them."""
    gc.enable()
    _open_streams()
    _fresh_randomness()
    _threads()
    faulthandler.enable()
    sys.argv = [request.module, *request.args]
    try:
        spec = importlib.util.find_spec(request.module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        print(f"there is no module {request.module!r} to run (sys.path: {os.pathsep.join(sys.path)})", file=sys.stderr)
        return int(RankExit.USAGE)
    module = importlib.import_module(request.module)
    entry = getattr(module, "main", None)
    if not callable(entry):
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
        return 0
    sys.argv[0] = getattr(module, "__file__", None) or request.module
    sys.modules["__main__"] = module  # what multiprocessing's spawned children look for
    return entry(list(request.args)) if _takes_arguments(entry) else entry()


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that ended the script as Python would, without the frames that led to it here."""
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.endswith(_OWN_FRAMES):
        trace = trace.tb_next
    sys.excepthook(kind, error.with_traceback(trace), trace)


def _default_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _open_streams() -> None:
    # Line by line, so that the last words of a process that is killed are in its log.
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(Output(descriptor, "w", closefd=False))
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")  # type: ignore[misc]


def _fresh_randomness() -> None:
    # random reseeds itself after a fork, torch begins with the same fixed seed in every process; numpy's legacy
    # generator was seeded at import and would give all replicas the same numbers.
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()


def _threads() -> None:
    # OpenMP read its variables when it was loaded, in the fork server; torch can still be told.
    torch = sys.modules.get("torch")
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if torch is not None and wanted.isdigit() and int(wanted) >= 1:
        torch.set_num_threads(int(wanted))


def _takes_arguments(entry: Any) -> bool:
    try:
        parameters = inspect.signature(entry).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def _name_process(name: str) -> None:
    # For ps and top (comm, 15 characters; proc_pid_comm(5)); the command line stays the fork server's.
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as comm:
            comm.write(f"ftar:{name}"[:15])
    except (OSError, UnicodeEncodeError):
        pass
