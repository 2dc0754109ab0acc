"""GPUs, through a child process with a deadline.

NVML calls hang when a driver is in trouble, so they are made in a child (nvml_child.py). An answer that does not come
within the deadline kills the child; the last reading stays, with its age in the note; a new child is started after 5 s
(doubling to 5 minutes). Where there is no library there is nothing to watch: the child says so, ends, and costs nothing
from then on.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from agents.api.models import GpuSummary, GpuView
from agents.api.words import Health
from agents.health.kernellog import slot
from agents.health.signals import Observed
from agents.monitors.gpujudge import DRIVER, judge, observed, observed_driver
from agents.monitors.nvml_child import GpuAnswer, GpuReading, XidSeen

POLL_S = 1.0
START_DEADLINE_S = 20.0  # nvmlInit loads the driver when nothing has used the GPUs yet
RESTART_S, RESTART_MAX_S = 5.0, 300.0
MAX_LINE_BYTES = 1 << 20
COMMAND = (sys.executable, "-m", "agents.monitors.nvml_child")


_NOT_READ = GpuAnswer(note="not read yet")


class ChildLost(Exception):
    """The child hangs, ended, or talks nonsense; the message says which."""


class GpuMonitor:
    """`summary` never blocks; a thread asks the child. `command` is a parameter so that tests can hang it."""

    def __init__(
        self,
        deadline_s: float,
        command: Sequence[str] = COMMAND,
        poll_s: float = POLL_S,
        *,
        expect: int | None = None,
        environment: Mapping[str, str] | None = None,
        on_xid: Callable[[XidSeen], None] = lambda xid: None,
    ) -> None:
        """`expect`: how many GPUs the node has. `environment`: more variables for the child. `on_xid` is called by the
        monitor's thread for every Xid that NVML reports."""
        self._deadline_s = deadline_s
        self._command = command
        self._poll_s = poll_s
        self._expect = expect
        self._environment = dict(os.environ) | dict(environment or {})
        self._on_xid = on_xid
        self._at: dict[str, tuple[int, str]] = {}
        self._wake_reader, self._wake = os.pipe2(os.O_CLOEXEC)
        self._child: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._answer = _NOT_READ
        self._answered_at = time.monotonic()
        self._trouble = ""
        self._failed_once = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        os.write(self._wake, b"x")
        if self._thread.is_alive():
            self._thread.join(self._deadline_s + 2)
        self._kill()

    def summary(self) -> GpuSummary:
        answer, trouble = self._answer, self._trouble
        devices = [_view(reading, answer.simulated) for reading in answer.gpus]
        note = answer.note
        if trouble:
            age_s = time.monotonic() - self._answered_at
            old = f"; last reading {age_s:.0f} s ago" if devices else ""
            note = f"GPUs cannot be read: {trouble}{old}"
        state = _overall(devices, trouble)
        found = sum(1 for reading in answer.gpus if not reading.lost)
        if not trouble and self._expect is not None and answer is not _NOT_READ and found < self._expect:
            few = f"{self._expect} GPUs expected, {found} answer"
            note, state = f"{few}; {note}" if note else few, Health.UNHEALTHY
        return GpuSummary(devices=devices, note=note, state=state, simulated=answer.simulated)

    def at(self, pci: str) -> tuple[int, str] | None:
        """Index and UUID of the GPU in that slot ("0000:04:00"), as it was while it answered."""
        return self._at.get(pci)

    def slots(self) -> dict[int, str]:
        """The other way round."""
        return {index: pci for pci, (index, _uuid) in list(self._at.items())}

    def observed(self, faults: Mapping[int, str]) -> list[Observed]:
        """For the incident book: the last reading. `faults`: index of a GPU -> id of the open fault on it, -1: on the
        driver, which is an object of its own from the first time that it could not be asked."""
        answer, trouble = self._answer, self._trouble
        found = [observed(reading, answer.simulated, faults.get(reading.index, "")) for reading in answer.gpus]
        if trouble:
            self._failed_once = True
        if self._failed_once:
            found.append(observed_driver(trouble, answer.simulated, faults.get(DRIVER, "")))
        return found

    def _run(self) -> None:
        restart_s = RESTART_S
        while not self._end.is_set():
            try:
                answer = self._ask()
            except ChildLost as lost:
                self._kill()
                self._trouble = str(lost)
                self._end.wait(restart_s)
                restart_s = min(restart_s * 2, RESTART_MAX_S)
                continue
            self._answer, self._answered_at, self._trouble = answer, time.monotonic(), ""
            self._at |= {slot(one.pci): (one.index, one.uuid) for one in answer.gpus if one.pci}
            restart_s = RESTART_S
            if answer.final:
                self._kill()
                return
            try:
                self._listen(self._poll_s)
            except ChildLost:
                continue  # the next question finds out

    def _listen(self, for_s: float) -> None:
        """Pass Xids on that come between two questions."""
        until = time.monotonic() + for_s
        while not self._end.is_set() and self._child is not None and (left_s := until - time.monotonic()) > 0:
            pipe = self._child.stdout.fileno() if self._child.stdout is not None else -1
            if b"\n" not in self._rest:
                ready = select.select([pipe, self._wake_reader], [], [], left_s)[0]
                if pipe not in ready:
                    return
                self._take(pipe)
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                self._tell(_decoded(line))

    def _tell(self, answer: GpuAnswer) -> None:
        for xid in answer.xids:
            self._on_xid(xid)

    def _ask(self) -> GpuAnswer:
        deadline_s = self._deadline_s
        if self._child is None:
            deadline_s = max(START_DEADLINE_S, self._deadline_s) if self._command is COMMAND else self._deadline_s
            try:
                self._child = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=self._environment,
                )
            except OSError as error:
                raise ChildLost(f"its process cannot be started: {error.strerror}") from None
            self._rest = b""
        elif self._child.stdin is not None:
            try:
                os.write(self._child.stdin.fileno(), b"\n")
            except OSError:
                raise ChildLost("its process ended") from None
        deadline = time.monotonic() + deadline_s
        while True:
            answer = _decoded(self._line(self._child, deadline, deadline_s))
            if not answer.xids:
                return answer
            self._tell(answer)

    def _line(self, child: subprocess.Popen[bytes], deadline: float, deadline_s: float) -> bytes:
        pipe = child.stdout.fileno() if child.stdout is not None else -1
        while b"\n" not in self._rest:
            left_s = deadline - time.monotonic()
            ready = select.select([pipe, self._wake_reader], [], [], left_s)[0] if left_s > 0 else []
            if self._end.is_set():
                raise ChildLost("the monitor ends")
            if pipe not in ready:
                raise ChildLost(f"GPU probe hangs: NVML did not answer within {deadline_s:g} s")
            self._take(pipe)
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _take(self, pipe: int) -> None:
        data = os.read(pipe, 65536)
        if not data:
            raise ChildLost("its process ended")
        self._rest += data
        if len(self._rest) > MAX_LINE_BYTES:
            raise ChildLost("its process answers nonsense")

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        try:
            child.wait(2)
        except subprocess.TimeoutExpired:
            pass  # in the kernel, with the driver; init gets it when it comes back


def _decoded(line: bytes) -> GpuAnswer:
    try:
        return msgspec.json.decode(line, type=GpuAnswer)
    except (msgspec.DecodeError, ValueError):
        raise ChildLost("its process answers nonsense") from None


def _view(reading: GpuReading, simulated: bool) -> GpuView:
    judgement = judge(reading)
    return GpuView(
        index=reading.index,
        uuid=reading.uuid,
        name=reading.name,
        temperature_c=reading.temperature_c,
        utilization_percent=reading.utilization_percent,
        memory_used_mb=reading.memory_used_mb,
        memory_total_mb=reading.memory_total_mb,
        power_w=reading.power_w,
        state=judgement.health,
        reason=judgement.reason,
        simulated=simulated,
        readings=reading.more,
        throttle=list(reading.throttle),
        pids=list(reading.pids),
    )


def _overall(devices: list[GpuView], trouble: str) -> Health:
    if trouble or not devices:
        return Health.UNKNOWN
    states = {device.state for device in devices}
    return next(h for h in (Health.UNHEALTHY, Health.DEGRADED, Health.UNKNOWN, Health.HEALTHY) if h in states)
