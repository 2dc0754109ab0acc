"""A process that has torch imported and forks a benchmark's replicas from it: a replica that is started again begins
within milliseconds, not seconds. It ends with the benchmark, and its children with it, however the benchmark ends.

Driven by jobs.py, line by line of JSON (serving.py). It has no thread but its main one, as a process that forks should.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

import torch
import torch._dynamo  # the first optimizer imports it: seconds, in every replica

import ftar_core.training.session  # noqa: F401
from ftar_core.bench.orphan import end_with_parent
from ftar_core.bench.serving import serve
from ftar_core.errors import FtarError
from ftar_core.wire.exits import RankExit


class Forks:
    def __init__(self) -> None:
        torch.set_num_threads(1)

    def preload(self, module: str) -> Any:
        """Whatever its `prepare()` reads, if it has one, the children have already; what it returns."""
        return getattr(import_module(module), "prepare", lambda: None)()

    def fork(self, module: str, options: Mapping[str, Any], environment: Mapping[str, str], log: str) -> int:
        """A child that calls `main(options)` of the module; its process id."""
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            become(parent, module, options, environment, log)
        return pid

    def ended(self) -> dict[int, int]:
        """Process id -> exit code (-N: signal N), of children that have ended since it was asked last."""
        found: dict[int, int] = {}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if pid == 0:
                return found
            found[pid] = os.waitstatus_to_exitcode(status)

    def end(self, pids: Sequence[int]) -> None:
        """Kill these children and wait for their ends."""
        for pid in pids:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def become(parent: int, module: str, options: Mapping[str, Any], environment: Mapping[str, str], log: str) -> NoReturn:
    """This process, a child of `parent`, becomes the replica."""
    code: int = RankExit.FAILED
    try:
        end_with_parent(parent)
        null = os.open(os.devnull, os.O_RDONLY)
        words = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        for mine, standard in ((null, 0), (words, 1), (words, 2)):
            os.dup2(mine, standard)
        for name in [name for name in os.environ if name.startswith("FTAR_")]:
            del os.environ[name]
        os.environ.update(environment)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S")
        import_module(module).main(options)
        code = RankExit.FINISHED
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else RankExit.FAILED
    except FtarError as error:
        print(f"error: {error}" + (f" ({error.hint})" if error.hint else ""), file=sys.stderr)
        code = RankExit.USAGE
    except BaseException:  # noqa: BLE001  whatever it was: this child must not go on as a second parent
        traceback.print_exc()
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(int(json.loads(sys.argv[1])["parent"]), Forks)
