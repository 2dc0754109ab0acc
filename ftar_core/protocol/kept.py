"""What a job's coordinator knows of its checkpoints: told by who writes them, for operators. Pure.

Nothing is decided by it: which one a job goes on from is found in the directory (training/checkpoints).
"""

from __future__ import annotations

from dataclasses import dataclass

from ftar_core.wire.messages import CheckpointNotice
from ftar_core.wire.views import CheckpointView


@dataclass
class Kept:
    """The newest complete one and the newest that failed. Times are the coordinator's clock, seconds."""

    step: int = 0  # 0: none is known
    at: float | None = None  # None: it was made in a life that this one knows nothing of
    bytes: int = 0
    seconds: float = 0.0
    failed_step: int = 0  # 0: none
    failed_at: float = 0.0
    failed: str = ""
    failures: int = 0

    def told(self, notice: CheckpointNotice, replica: str, now: float) -> None:
        if notice.problem:
            self.failed_step, self.failed_at, self.failures = notice.step, now, self.failures + 1
            self.failed = f"{replica}: {notice.problem[:500]}"
        else:
            self.step, self.at, self.bytes, self.seconds = notice.step, now, max(0, notice.bytes), notice.seconds

    def began(self, step: int) -> None:
        """The job goes on from the one of this step."""
        if step != self.step:
            self.step, self.at, self.bytes, self.seconds = step, None, 0, 0.0

    def view(self, offset: float) -> CheckpointView:
        """`offset`: what makes Unix seconds of the coordinator's clock."""
        return CheckpointView(
            step=self.step,
            time=self.at + offset if self.at is not None else 0.0,
            bytes=self.bytes,
            seconds=self.seconds,
            failed_step=self.failed_step,
            failed_time=self.failed_at + offset if self.failed_step else 0.0,
            failed=self.failed,
            failures=self.failures,
        )


def kept_of(saved: CheckpointView, offset: float) -> Kept:
    """From what the life before has saved; a date in the future is one that was wrong."""
    return Kept(
        step=saved.step,
        at=saved.time - offset if saved.time else None,
        bytes=saved.bytes,
        seconds=saved.seconds,
        failed_step=saved.failed_step,
        failed_at=saved.failed_time - offset,
        failed=saved.failed[:600],
        failures=saved.failures,
    )
