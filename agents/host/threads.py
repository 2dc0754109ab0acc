"""What a process is doing, seen from outside: /proc, and the Python stacks that a rank of ours writes on request.

Nothing here stops, resumes or traces a process. The request is a signal, sent only if the process has a handler for it
(else it would be its end), to a thread of it that only waits. A stopped process is not asked: it could not answer, and
would do so when it is resumed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from dataclasses import dataclass, field

from ftar_core.wire.agentlink import MEMORY_FILE, StackWay

MAX_THREADS = 128
MAX_TEXT = 128 * 1024
ANSWER_S = 2.0  # a busy machine with many threads; a process in state D does not answer at all
SETTLED_S = 0.06
STATUS = ("State", "Threads", "VmRSS", "VmSwap", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")


@dataclass(frozen=True)
class Thread:
    """`wchan` is the kernel function it sleeps in, `syscall` the call's number and arguments; "" where unreadable."""

    tid: int
    name: str
    state: str
    wchan: str
    syscall: str


@dataclass(frozen=True)
class Looked:
    """`state` is the letter of proc(5); "" if there is no such process. `note`: why there are no Python stacks."""

    pid: int
    state: str
    status: dict[str, str] = field(default_factory=dict)
    threads: tuple[Thread, ...] = ()
    threads_left_out: int = 0
    kernel_stack: str = ""
    python: str = ""
    note: str = ""


def look(pid: int, way: StackWay | None) -> Looked:
    """Takes up to ANSWER_S. Never raises for what a process may be or become."""
    state = _state(f"/proc/{pid}/stat")
    if not state:
        return Looked(pid, "", note="the process is gone")
    threads, left_out = _threads(pid)
    python, note = _python(pid, state, way)
    return Looked(
        pid=pid,
        state=state,
        status=_status(pid),
        threads=threads,
        threads_left_out=left_out,
        kernel_stack=_read(f"/proc/{pid}/stack", 4096),
        python=python,
        note=note,
    )


def _python(pid: int, state: str, way: StackWay | None) -> tuple[str, str]:
    if state in ("T", "t"):
        return "", f"stopped by a signal (state {state}): it cannot say where it is, and is not woken up for that"
    if state in ("Z", "X"):
        return "", "it has ended already"
    if way is None:
        return (
            "",
            "it has not registered with this agent (FTAR_AGENT), or not yet: only what the kernel knows",
        )
    if not _handles(pid, way.signal):
        return "", f"it does not answer to signal {way.signal} any more"
    try:
        descriptor = _open_memory(pid, way.file)
    except OSError as error:
        return "", f"its stacks cannot be read: {error.strerror or error}"
    try:
        os.ftruncate(descriptor, 0)
        _send(pid, way.thread, way.signal)
        text = _settled(descriptor)
    except OSError as error:
        return "", f"its stacks cannot be read: {error.strerror or error}"
    finally:
        os.close(descriptor)
    if not text:
        return "", f"it did not answer within {ANSWER_S:g} s (state {_state(f'/proc/{pid}/stat') or 'gone'})"
    return text, ""


def _open_memory(pid: int, number: int) -> int:
    """Only a file in memory of the name that ranks give it: the number is what a process has told."""
    path = f"/proc/{pid}/fd/{number}"
    if not os.readlink(path).startswith(f"/memfd:{MEMORY_FILE}"):
        raise OSError(0, f"descriptor {number} is something else")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _settled(descriptor: int) -> str:
    """What was written, once nothing more comes."""
    deadline = time.monotonic() + ANSWER_S
    size, since = 0, time.monotonic()
    while time.monotonic() < deadline:
        now = os.fstat(descriptor).st_size
        if now != size:
            size, since = now, time.monotonic()
        elif size and time.monotonic() - since >= SETTLED_S:
            break
        time.sleep(0.005)
    return os.pread(descriptor, MAX_TEXT, 0).decode(errors="replace")


def _send(pid: int, thread: int, number: int) -> None:
    """To one thread, tgkill(2)."""
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)
    if tgkill is None or not os.path.isdir(f"/proc/{pid}/task/{thread}"):
        os.kill(pid, number)
    elif tgkill(pid, thread, number) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _handles(pid: int, number: int) -> bool:
    """The process has a handler of its own for this signal (SigCgt in proc(5))."""
    if not signal.SIGRTMIN <= number <= signal.SIGRTMAX:
        return False
    for line in _read(f"/proc/{pid}/status", 8192).splitlines():
        if line.startswith("SigCgt:"):
            with contextlib.suppress(ValueError):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _threads(pid: int) -> tuple[tuple[Thread, ...], int]:
    try:
        tids = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task") if name.isdigit())
    except OSError:
        return (), 0
    shown = []
    for tid in tids[:MAX_THREADS]:
        base = f"/proc/{pid}/task/{tid}"
        state = _state(f"{base}/stat")
        if state:
            shown.append(Thread(tid, _read(f"{base}/comm", 64), state, _wchan(base), _read(f"{base}/syscall", 256)))
    return tuple(shown), max(0, len(tids) - MAX_THREADS)


def _wchan(base: str) -> str:
    text = _read(f"{base}/wchan", 128)
    return "" if text == "0" else text


def _status(pid: int) -> dict[str, str]:
    found = {}
    for line in _read(f"/proc/{pid}/status", 8192).splitlines():
        key, _, value = line.partition(":")
        if key in STATUS:
            found[key] = value.strip()
    return found


def _state(path: str) -> str:
    """The letter behind the name, which may itself hold brackets."""
    _, _, rest = _read(path, 1024).rpartition(")")
    return rest.split()[0] if rest.split() else ""


def _read(path: str, limit: int) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode(errors="replace").strip()
    except OSError:
        return ""
