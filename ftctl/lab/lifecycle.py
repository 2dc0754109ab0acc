"""`lab up` and `lab down`: a lab is made whole or not at all.

Whatever ends `lab up` early, an error, Ctrl-C, SIGTERM, takes everything back before it returns. If even `lab up` is
killed with SIGKILL, the keeper notices the closed pipe and does it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ftctl.errors import CliError, UsageProblem
from ftctl.exit_codes import ExitCode
from ftctl.lab import configure, credentials, teardown
from ftctl.lab.credentials import Credentials
from ftctl.lab.interrupts import interruptible, uninterrupted
from ftctl.lab.keeper import ANNOUNCED
from ftctl.lab.layout import LabOptions, Node, check, nodes
from ftctl.lab.locks import LabBusy, locked
from ftctl.lab.manifest import MARKER, KeeperState, Manifest, ManifestError, ProcessSpec, load, save
from ftctl.lab.paths import (
    LabPaths,
    UnsafeDirectory,
    ensure_private,
    lab_paths,
    labs_dir,
    make_private,
    runtime_dir_for,
    state_dir,
    tail,
)
from ftctl.lab.processes import processes_of
from ftctl.lab.teardown import Leftovers

NETWORK_WITHIN_S = 30.0  # takes 0.5 s; much more is a hung kernel or a machine without memory
POLL_S = 0.05
ROOM = 4 * 2**20  # bytes; a lab's files are some 0.5 MiB before it writes its first log
FULL = 64 * 1024  # with less, logs end in the middle
ROOM_HINT = "df -h; df -i; FTCTL_STATE_DIR moves labs elsewhere"

Processes = Callable[[LabPaths, Manifest, Sequence[Node], Credentials], tuple[ProcessSpec, ...]]
Ready = Callable[["Lab"], None]
Progress = Callable[[str], None]


@dataclass
class Lab:
    """A lab that is being made or was found."""

    paths: LabPaths
    manifest: Manifest
    nodes: tuple[Node, ...]
    process: subprocess.Popen[bytes] | None = None  # the keeper, until the lab is announced

    def announce(self) -> None:
        """From here on the lab outlives this process."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.write(ANNOUNCED)
            self.process.stdin.close()
            self.process.returncode = 0  # tells subprocess not to warn that it is still running
            self.process = None

    def forget_process(self) -> None:
        """After the keeper has ended."""
        if self.process is not None:
            if self.process.stdin is not None:
                with suppress(OSError):
                    self.process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=1.0)
            self.process = None

    @property
    def name(self) -> str:
        return self.manifest.options.name

    def keeper(self) -> KeeperState | None:
        with suppress(ManifestError):
            return load(self.paths.keeper_state, KeeperState)
        return None


def bring_up(
    options: LabOptions,
    ready: Ready,
    progress: Progress = lambda _text: None,
    processes: Processes = configure.process_list,
    announce: bool = True,
) -> Lab:
    """Make the lab, start everything, return when `ready` does. After CliError or KeyboardInterrupt nothing is left.

    `ready(lab)` waits until the lab does what it is for, or raises CliError. `processes` is what the keeper runs.
    Without `announce` the lab goes when this process does, until `Lab.announce`.
    """
    check(options)
    paths = lab_paths(options.name)
    with interruptible(), _errors_of_the_disk(options.name):
        ensure_private(labs_dir())
        if full := without_room(labs_dir(), ROOM):
            raise UsageProblem(f"lab {options.name}", full, ROOM_HINT)
        with _lock(options.name):
            _refuse_if_there(paths)
            lab: Lab | None = None
            try:
                progress("writing certificates and configuration")
                lab = _write(paths, options, processes)
                progress("making namespaces and links")
                lab.process = _start_keeper(lab)
                _wait_for_network(lab, lab.process)
                ready(lab)
                if announce:
                    lab.announce()
            except BaseException as error:
                with uninterrupted():
                    _take_back(paths, lab, error)
                raise
            return lab


def _write(paths: LabPaths, options: LabOptions, processes: Processes) -> Lab:
    number = str(uuid.uuid4())
    manifest = Manifest(
        uuid=number, runtime_dir=str(runtime_dir_for(number)), options=options, created=time.time(), version=_version()
    )
    lab = Lab(paths, manifest, nodes(options))
    make_private(paths.root)
    save(paths.manifest, manifest)
    secrets = credentials.make(paths, lab.nodes)
    configure.write_all(paths, manifest, lab.nodes, secrets, processes(paths, manifest, lab.nodes, secrets))
    return lab


def _start_keeper(lab: Lab) -> subprocess.Popen[bytes]:
    with lab.paths.log("keeper").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ftctl.lab.keeper", str(lab.paths.root)],
            env={**os.environ, MARKER: lab.manifest.uuid},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd="/",  # not the user's: that directory may be removed, or hold a package that hides one of ours
            start_new_session=True,
        )


def _wait_for_network(lab: Lab, keeper: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + NETWORK_WITHIN_S
    while True:
        state = lab.keeper()
        if state is not None and state.phase == "running":
            return
        if state is not None and state.phase == "failed":
            raise CliError(f"lab {lab.name}", state.error, state.hint, ExitCode.USAGE)
        if keeper.poll() is not None or time.monotonic() > deadline:
            why = "ended" if keeper.poll() is not None else "did not finish"
            said = " / ".join(tail(lab.paths.log("keeper"), 3)) or "no output"
            raise CliError(f"lab {lab.name}", f"the keeper {why} while making the network: {said}", "ftctl doctor")
        time.sleep(POLL_S)


def _take_back(paths: LabPaths, lab: Lab | None, error: BaseException) -> None:
    """Keep the logs of a lab that failed by itself, remove the rest."""
    # On a full disk, what its processes wanted to say of it found no room either.
    full = without_room(paths.root, FULL) if isinstance(error, CliError) else ""
    if isinstance(error, CliError) and (kept := keep_logs(paths)) is not None:
        error.hint = f"{error.hint + '; ' if error.hint else ''}all logs are in {kept}"
    left = teardown.take_down(paths)
    if lab is not None:
        lab.forget_process()
    if left.lines():
        raise CliError(
            f"lab {paths.root.name}",
            f"could not be removed completely: {'; '.join(left.lines())}",
            f"ftctl lab down --name {paths.root.name}",
        ) from error
    if full and isinstance(error, CliError):
        raise CliError(f"lab {paths.root.name}", f"{full} ({error})", ROOM_HINT, error.code) from error


def without_room(directory: Path, least: int) -> str:
    """A sentence if the file system of `directory` has fewer bytes left than `least`, or no more files, else empty."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return ""
    left = found.f_bavail * found.f_frsize
    if left < least:
        return f"only {left // 1024} KiB are left in {directory}"
    return f"no more files fit into {directory}" if found.f_files and not found.f_favail else ""


def keep_logs(paths: LabPaths) -> Path | None:
    """Copy the logs and journals of a lab that is about to be removed; where to, or None if that was not possible."""
    kept = state_dir() / "failed" / paths.root.name
    try:
        ensure_private(kept.parent)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(paths.logs, kept)
        shutil.copytree(paths.journal, kept / "journal")
        for log in sorted((paths.root / "nodes").glob("*/state/replicas/**/log*")):
            place = log.relative_to(paths.root / "nodes").parts
            shutil.copy(log, kept / "-".join((place[0], *place[3:])))
    except (OSError, UnsafeDirectory):
        return None
    return kept


def _refuse_if_there(paths: LabPaths) -> None:
    """One lab a name. What is left of a dead one is removed; a living one is the user's business."""
    if not os.path.lexists(paths.root):
        return
    down = f"ftctl lab down --name {paths.root.name}"
    try:
        manifest = load(paths.manifest, Manifest)
    except ManifestError:
        if paths.manifest.exists():
            raise UsageProblem(f"lab {paths.root.name}", f"{paths.manifest} is damaged", down) from None
    else:
        if processes_of(manifest.uuid):
            raise UsageProblem(
                f"lab {paths.root.name}", "is already up", f"{down}   or   ftctl lab up --name OTHER for one more"
            )
    left = teardown.take_down(paths)
    if left.lines():
        raise UsageProblem(f"lab {paths.root.name}", f"old files cannot be removed: {'; '.join(left.lines())}", down)


def take_down(name: str) -> Leftovers | None:
    """Remove a lab, whatever state it is in; None if there is none of this name. Raises CliError."""
    if not os.path.lexists(lab_paths(name).root):
        return None
    with _errors_of_the_disk(name), _lock(name):
        with uninterrupted():
            try:
                return teardown.take_down(lab_paths(name))
            except ManifestError as error:
                raise CliError(
                    f"lab {name}",
                    f"{error}, so its processes cannot be told from others",
                    f"end them by hand, then rm -r {lab_paths(name).root}",
                ) from None


@contextmanager
def _lock(name: str) -> Iterator[None]:
    """One ftctl at a time makes or removes the lab of this name."""
    try:
        with locked(lab_paths(name)):
            yield
    except LabBusy:
        raise UsageProblem(
            f"lab {name}", "another ftctl is just making or removing it", "wait for it, or press Ctrl-C there"
        ) from None


@contextmanager
def _errors_of_the_disk(name: str) -> Iterator[None]:
    try:
        yield
    except UnsafeDirectory as error:
        raise UsageProblem(f"lab {name}", str(error), "set FTCTL_STATE_DIR to a directory of your own") from None
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise CliError(f"lab {name}", f"{error.strerror or error}{where}", ROOM_HINT) from None


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ftctl")
    except PackageNotFoundError:
        return ""
