"""What a training script says about its checkpoints."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ftar_core.errors import CheckpointError, SettingsError

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h)\Z")
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
MOST_S = 30 * 86400.0


@dataclass(frozen=True)
class Checkpoint:
    """`Session(model, optimizer, checkpoint=ftar_core.Checkpoint("/shared/run7", every=100))`.

    `directory`: of this job alone, seen by all replicas; it is made if it is not there. `every`: so many steps, or a
    time ("10min", a timedelta), which the coordinator measures. `keep`: the newest so many stay, older ones go.
    `at_end`: one more behind the job's last step. `restore`: a job of which nobody has state any more goes on from the
    newest one that is complete. `takeover_s`: when nothing has been written for so long, another replica does it.

    Raises SettingsError."""

    directory: str | os.PathLike[str]
    every: int | str | timedelta = 100
    keep: int = 3
    at_end: bool = True
    restore: bool = True
    takeover_s: float = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str | os.PathLike) or not os.fspath(self.directory):
            raise SettingsError(f"checkpoint directory {self.directory!r}", hint="give the path of a directory")
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 1:
            raise SettingsError(f"checkpoint keep={self.keep!r}: a number of at least 1 is expected")
        if not 0 < self.takeover_s <= MOST_S:
            raise SettingsError(f"checkpoint takeover_s={self.takeover_s!r}: seconds above 0 are expected")
        if not (self.steps or self.seconds):
            raise SettingsError(
                f"checkpoint every={self.every!r}",
                hint="give a number of steps, or a time such as '10min', '90s', '1h'",
            )

    @property
    def path(self) -> Path:
        return Path(self.directory)

    @property
    def steps(self) -> int:
        """0: by time."""
        if isinstance(self.every, int) and not isinstance(self.every, bool) and self.every > 0:
            return self.every
        return 0

    @property
    def seconds(self) -> float:
        """0: by steps."""
        if isinstance(self.every, timedelta):
            seconds = self.every.total_seconds()
        elif isinstance(self.every, str) and (found := _SPAN.match(self.every.strip())):
            seconds = float(found[1]) * _UNITS[found[2]]
        else:
            return 0.0
        return seconds if 0 < seconds <= MOST_S else 0.0


def problem_with(options: Checkpoint, error: CheckpointError | OSError) -> str:
    """Why its directory cannot be used, in one line."""
    if isinstance(error, OSError):
        return f"checkpoint directory {options.path}: {error.strerror or error}"
    return str(error) + (f" ({error.hint})" if error.hint else "")
