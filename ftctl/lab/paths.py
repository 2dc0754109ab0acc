"""Where a lab keeps its files, and how they are written.

State (tokens, keys, logs, journals) lives in the user's state directory, 0700. Unix sockets live in a short directory
of their own, because a socket's path may have 107 bytes only (unix(7)) and a state directory can be deep.
"""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

STATE_VARIABLE = "FTCTL_STATE_DIR"
LONGEST_SOCKET_PATH = 100


class UnsafeDirectory(Exception):
    """A directory that ought to be this user's own is not."""


def state_dir() -> Path:
    """FTCTL_STATE_DIR, or the user's state directory (~/.local/state/ftctl)."""
    override = os.environ.get(STATE_VARIABLE)
    if override:
        return Path(override).absolute()
    import platformdirs

    return Path(platformdirs.user_state_path("ftctl"))


def labs_dir() -> Path:
    return state_dir() / "labs"


@dataclass(frozen=True)
class LabPaths:
    """Names of everything in a lab's directory."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "lab.json"

    @property
    def processes(self) -> Path:
        return self.root / "processes.json"

    @property
    def keeper_state(self) -> Path:
        return self.root / "keeper.json"

    @property
    def inventory(self) -> Path:
        return self.root / "inventory.yaml"

    @property
    def tokens(self) -> Path:
        return self.root / "tokens"

    @property
    def tls(self) -> Path:
        return self.root / "tls"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        """All replicas see the same directory, as they would on a shared file system."""
        return self.root / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def store(self) -> Path:
        return self.root / "coordinator"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def node(self, name: str) -> Path:
        return self.root / "nodes" / name


def lab_paths(name: str) -> LabPaths:
    return LabPaths(labs_dir() / name)


def runtime_dir_for(uuid: str) -> Path:
    """The sockets' directory of a lab, by its uuid: known before it is made, so that `lab down` always finds it."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    name = f"ftctl-{os.geteuid()}-{uuid[:8]}"
    usable = bool(base) and os.path.isabs(base) and os.access(base, os.W_OK) and len(base) < 40
    return Path(base if usable else "/tmp") / name  # noqa: S108 - the directory is made 0700, exclusively


def make_private(path: Path) -> None:
    """Make a directory 0700; it must not exist. Raises OSError."""
    path.mkdir(mode=0o700)


def ensure_private(path: Path) -> None:
    """Make a directory 0700 with its parents, or check that it is this user's. Raises UnsafeDirectory, OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise UnsafeDirectory(f"{path} is not a directory of this user") from None


def write_private(path: Path, text: str) -> None:
    """Replace a file, mode 0600, so that a reader sees the old text or the new one. Raises OSError."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # made 0600
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def tail(path: Path, lines: int = 20, limit_bytes: int = 64 * 1024) -> list[str]:
    """The last lines of a text file; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]
