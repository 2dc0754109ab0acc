"""The keeper of a lab: `python -m ftctl.lab.keeper DIR`, one process a lab, in a session of its own.

It makes the namespaces and holds them open, builds the network, starts the coordinator and the agents in their places,
and starts again what dies, as systemd would on real nodes. It needs no command channel: what to run is in the lab's
directory, how it goes is written there, and SIGTERM ends all processes of the lab.

A lab is either announced or gone. Standard input is a pipe from `ftctl lab up`: the line "up" says that the user was
told of the lab. If the pipe closes without it, `lab up` was killed, and the keeper takes everything down, the lab's
directory included.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ftctl.lab import namespaces, teardown
from ftctl.lab.layout import Node, nodes
from ftctl.lab.locks import LabBusy, locked
from ftctl.lab.manifest import (
    MARKER,
    ChildState,
    KeeperState,
    Manifest,
    ManifestError,
    ProcessSpec,
    load,
    load_manifest,
    save,
)
from ftctl.lab.namespaces import NamespaceError
from ftctl.lab.paths import LabPaths
from ftctl.lab.processes import end_all
from ftctl.lab.switches import LOOK_S, Switches

ANNOUNCED = b"up\n"
FABRIC = "fabric"
# A process that ends at once is started again after 0.2 s, then twice as long each time, so that one that cannot start
# costs next to nothing; one that ran for 10 s has shown that it can, and its next restart is quick again.
FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0
HEALTHY_S = 10.0
LOCK_S = 60.0  # for whoever else is making or removing the lab
WRITE_AGAIN_S = 1.0  # between attempts to write keeper.json on a full disk


def next_delay(previous_s: float, ran_s: float) -> float:
    """Seconds to wait before the next start of a process that ran for `ran_s`."""
    if ran_s >= HEALTHY_S or previous_s <= 0:
        return FIRST_DELAY_S
    return min(2 * previous_s, LONGEST_DELAY_S)


@dataclass
class Child:
    """One process as the keeper runs it. `pid` 0: not running; `start_at` is when to start it (monotonic seconds)."""

    spec: ProcessSpec
    pid: int = 0
    started: float = 0.0
    start_at: float | None = 0.0
    delay_s: float = 0.0
    restarts: int = 0
    exit_code: int | None = None

    def ended(self, code: int, now: float) -> None:
        """It ended with this exit code (negative: by that signal)."""
        self.pid = 0
        self.exit_code = code
        if code in self.spec.final_codes:
            self.start_at = None
            return
        self.delay_s = next_delay(self.delay_s, now - self.started)
        self.start_at = now + self.delay_s

    def view(self) -> ChildState:
        return ChildState(
            name=self.spec.name,
            namespace=self.spec.namespace,
            state="running" if self.pid else "ended" if self.start_at is None else "waiting",
            pid=self.pid,
            restarts=self.restarts,
            exit_code=self.exit_code,
            log=self.spec.log,
        )


@dataclass
class Keeper:
    paths: LabPaths
    manifest: Manifest
    children: list[Child]
    wakeup: int  # readable after a signal
    spaces: dict[str, int] = field(default_factory=dict)
    switches: Switches | None = None
    stopping: bool = False
    announced: bool = False
    stdin_open: bool = True
    unwritten: bool = False  # keeper.json is older than what happened: its disk was full

    def build(self) -> None:
        """Namespaces and network. Raises NamespaceError."""
        from ftctl.lab import network  # pyroute2 is slow to import: only once the lab is known to be wanted

        plan: tuple[Node, ...] = nodes(self.manifest.options)
        namespaces.gain_power()
        for name in (FABRIC, *(node.name for node in plan)):
            self.spaces[name] = namespaces.new_network()
        # At home in the fabric: a user namespace's root may not go back to the machine's own network, and needs not.
        namespaces.setns(self.spaces[FABRIC], namespaces.CLONE_NEWNET)
        hosts = {name: fd for name, fd in self.spaces.items() if name != FABRIC}
        network.build(self.spaces[FABRIC], hosts, plan, self.manifest.options.rate, namespaces.inside)
        self.switches = Switches([device.port for node in plan for device in node.devices()])

    def write(self, phase: str, error: str = "", hint: str = "") -> None:
        state = KeeperState(
            pid=os.getpid(),
            phase=phase,
            error=error,
            hint=hint,
            namespaces=dict(self.spaces),
            children=tuple(child.view() for child in self.children),
        )
        try:
            save(self.paths.keeper_state, state)
            self.unwritten = False
        except OSError:  # a full disk must not end the lab; status shows an older view until there is room again
            self.unwritten = True

    def start_due(self, now: float) -> None:
        for child in self.children:
            if child.pid == 0 and child.start_at is not None and child.start_at <= now:
                self._start(child, now)

    def _start(self, child: Child, now: float) -> None:
        spec = child.spec
        # Opened by posix_spawn in the child; descriptors of the keeper close on exec by themselves.
        log = (os.POSIX_SPAWN_OPEN, 1, spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), log, (os.POSIX_SPAWN_DUP2, 1, 2)]
        if child.started:
            child.restarts += 1
        child.started, child.start_at = now, None
        try:
            with namespaces.inside(self.spaces[spec.namespace]):
                child.pid = os.posix_spawn(
                    spec.argv[0], list(spec.argv), {**os.environ, **spec.env}, file_actions=files, setsid=True
                )
        except OSError as error:
            _say(f"{spec.name} cannot be started: {error}")
            child.ended(127, now)

    def reap(self, now: float) -> bool:
        """Collect ended children and adopted orphans; True if one of ours was among them."""
        by_pid = {child.pid: child for child in self.children if child.pid}
        changed = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return changed
            if pid == 0:
                return changed
            if pid in by_pid:
                code = os.waitstatus_to_exitcode(status)
                by_pid[pid].ended(code, now)
                _say(f"{by_pid[pid].spec.name} (pid {pid}) ended with {code}")
                changed = True

    def wait(self, now: float) -> None:
        """Until a signal, a word from `lab up`, the next start, or the next look at the switches."""
        due = [child.start_at for child in self.children if child.pid == 0 and child.start_at is not None]
        watched = [self.wakeup, *([0] if self.stdin_open else [])]
        if self.unwritten:
            due.append(now + WRITE_AGAIN_S)
        if self.switches is not None:
            due.append(now + LOOK_S)
        ready, _, _ = select.select(watched, [], [], max(0.0, min(due) - now) if due else None)
        if self.wakeup in ready and signal.SIGTERM in os.read(self.wakeup, 4096):
            self.stopping = True
        if 0 in ready:
            word = os.read(0, 64)
            self.announced = self.announced or word == ANNOUNCED
            self.stdin_open = bool(word)

    @property
    def abandoned(self) -> bool:
        """`lab up` went away before it could tell anybody of this lab."""
        return not self.announced and not self.stdin_open

    def run(self) -> None:
        self.write("running")
        while not self.stopping and not self.abandoned:
            now = time.monotonic()
            if self.switches is not None:
                self.switches.look()
            changed = self.reap(now)
            before = [child.pid for child in self.children]
            self.start_due(now)
            if changed or self.unwritten or before != [child.pid for child in self.children]:
                self.write("running")
            self.wait(now)
        if self.stopping:
            self.write("stopping")
            end_all(self.manifest.uuid, teardown.GRACE_S)
        else:
            _say("ftctl lab up ended before the lab was complete: taking it down")
            self._take_down()

    def _take_down(self) -> None:
        """The lock may still be the dying `lab up`'s: its files close one after the other, and the pipe may be first.
        Busy for longer: a `lab down` is at it, and ends this process too."""
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                with locked(self.paths):
                    teardown.take_down(self.paths)
                return
            except LabBusy as error:
                if time.monotonic() > deadline:
                    _say(f"not taken down: {error}")
                    return
                time.sleep(0.02)


def _say(text: str) -> None:
    """To the keeper's log. Its disk may be full: that must not end the lab, least of all when something just died."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _signals() -> int:
    """Signals become bytes in a pipe (signal.set_wakeup_fd), read in one place of the loop."""
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda _number, _frame: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return readable


def main(argv: list[str]) -> int:
    paths = LabPaths(Path(argv[1]))
    try:
        manifest = load_manifest(paths.manifest)
        specs = load(paths.processes, tuple[ProcessSpec, ...])
    except ManifestError as error:
        print(error, file=sys.stderr)
        return 2
    if os.environ.get(MARKER) != manifest.uuid:
        print(f"{MARKER} is not this lab's: start labs with ftctl lab up", file=sys.stderr)
        return 2
    keeper = Keeper(paths, manifest, [Child(spec) for spec in specs], _signals())
    keeper.write("building")
    try:
        namespaces.adopt_orphans()
        keeper.build()
    except (NamespaceError, OSError) as error:
        keeper.write("failed", str(error), getattr(error, "hint", ""))
        return 1
    keeper.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
