"""The children of a fork server: forked, recorded before they may run, reaped, and their ends recorded."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from agents.host.processes import boot_id, boot_s, kill_session, start_time_of
from agents.recovery import logs
from agents.recovery.records import Child, Children, Exit, Life, NotSpawned, Spawn, Spawned, write_record

_REMEMBERED = 64  # ends kept in memory, for an agent that cannot read the file


@dataclass
class Running:
    name: str
    directory: Path
    life: Life


@dataclass
class Job:
    """What the forked child has to do; only ever seen on the child's side of the fork."""

    request: Spawn
    go: int  # readable once life.json is on disk
    log: int


class Forks:
    def __init__(self) -> None:
        self._server = (os.getpid(), start_time_of(os.getpid()) or 0)
        self._boot_id = boot_id()
        self._running: dict[int, Running] = {}
        self._ended: OrderedDict[tuple[str, int], Child] = OrderedDict()
        self._unsaved: list[tuple[Path, Exit]] = []
        self.fresh = False  # children execute a new interpreter

    @property
    def there(self) -> bool:
        """Some run, or the end of one is not on disk yet."""
        return bool(self._running or self._unsaved)

    @property
    def unsaved(self) -> bool:
        return bool(self._unsaved)

    def all(self) -> Children:
        living = [Child(name=r.name, life=r.life, exit=None) for r in self._running.values()]
        return Children(children=(*living, *self._ended.values()))

    def life_of(self, name: str) -> Life | None:
        """The one that runs now."""
        return next((running.life for running in self._running.values() if running.name == name), None)

    def spawn(self, request: Spawn) -> Job | Spawned | NotSpawned:
        """Fork. The child waits for `go`, which comes after life.json is on disk: no process runs unrecorded."""
        directory = Path(request.directory)
        try:
            log = logs.open_log(Path(request.log))
        except OSError as error:
            return _not(request, f"its log cannot be opened: {request.log}: {error.strerror}")
        go, start = os.pipe()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            offset = os.lseek(log, 0, os.SEEK_END)
            when = datetime.now().astimezone().isoformat(timespec="milliseconds")
            with contextlib.suppress(OSError):
                os.write(log, f"--- {request.name}, start {request.life}, {when}\n".encode())
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                os.close(start)
                return Job(request, go, log)
        except OSError as error:
            os.close(start)
            return _not(request, f"it cannot be forked: {error.strerror}")
        finally:
            if os.getpid() == self._server[0]:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                os.close(go)
                os.close(log)
        life = Life(
            life=request.life,
            pid=pid,
            start_time=start_time_of(pid) or 0,
            boot_id=self._boot_id,
            server_pid=self._server[0],
            server_start_time=self._server[1],
            log_offset=offset,
            fresh=self.fresh,
        )
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(directory / "exit.json")
            write_record(directory / "life.json", life)
            os.write(start, b"g")
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return _not(request, f"it cannot be recorded in {directory}: {error.strerror}")
        finally:
            os.close(start)
        self._running[pid] = Running(request.name, directory, life)
        return Spawned(name=request.name, life=life)

    def reap(self) -> None:
        for pid, running in list(self._running.items()):
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None:
                continue
            kill_session(pid, running.life.start_time)
            os.waitpid(pid, 0)
            del self._running[pid]
            exited = info.si_code == os.CLD_EXITED
            end = Exit(
                life=running.life.life,
                pid=pid,
                start_time=running.life.start_time,
                exit_code=info.si_status if exited else None,
                signal=None if exited else info.si_status,
                ended=time.time(),
                ended_boot_s=boot_s(),
            )
            self._ended[(running.name, end.life)] = Child(name=running.name, life=running.life, exit=end)
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
            self._unsaved.append((running.directory / "exit.json", end))

    def save(self) -> None:
        waiting: list[tuple[Path, Exit]] = []
        for path, end in self._unsaved:
            try:
                write_record(path, end)
            except FileNotFoundError:
                pass  # the state directory was removed: nobody will ask
            except OSError as error:
                say(f"{path}: {error.strerror}; trying again")
                waiting.append((path, end))
        self._unsaved = waiting


def _not(request: Spawn, reason: str) -> NotSpawned:
    say(f"{request.name}: {reason}")
    return NotSpawned(name=request.name, life=request.life, reason=reason)


def say(text: str) -> None:
    print(f"{datetime.now().astimezone().isoformat(timespec='milliseconds')} {text}", flush=True)
