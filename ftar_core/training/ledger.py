"""The journal lines of steps, and the numbers that are derived from one step to the next: stall, tokens a second."""

from __future__ import annotations

from collections import deque
from statistics import median

from ftar_core.training.journal import Journal, StallMeter
from ftar_core.wire.ids import EpochId
from ftar_core.wire.messages import Commit, Verdict

WINDOW = 20  # steps


class StepLedger:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._stalls = StallMeter()
        self._last_committed: float | None = None
        self._last_epoch: EpochId | None = None
        self.loss: float | None = None  # mean over the contributors of the last step
        self.stall_ms: float | None = None
        self.tokens_per_s: float | None = None
        self._computing: deque[float] = deque(maxlen=WINDOW)
        self._waiting: deque[float] = deque(maxlen=WINDOW)

    @property
    def compute_ms(self) -> float | None:
        """A step, to its last gradient: the median of the last ones."""
        return median(self._computing) * 1000.0 if self._computing else None

    @property
    def wait_ms(self) -> float | None:
        """A step, from its last gradient to the commit."""
        return median(self._waiting) * 1000.0 if self._waiting else None

    def step(
        self,
        commit: Commit,
        *,
        batches: dict[str, int],
        incarnation: int,
        began: float,
        produced: float,
        reduced: float,
        committed: float,
        updated: float,
        retries: int,
        loss: float | None,
        tokens: int,
    ) -> None:
        """A step that this replica contributed to, and the batch of each contributor. Times in seconds of
        CLOCK_MONOTONIC."""
        self._computing.append(produced - began)
        self._waiting.append(committed - produced)
        calm = retries == 0 and commit.epoch == self._last_epoch
        self._last_epoch = commit.epoch
        self.stall_ms = self._stalls.measure(produced, committed, calm=calm)
        self.loss = loss
        if self._last_committed is not None and committed > self._last_committed:
            self.tokens_per_s = tokens / (committed - self._last_committed)
        self._last_committed = committed
        self._journal.write(
            "step",
            {
                "step": commit.step,
                "term": commit.epoch.term.number,
                "epoch": commit.epoch.number,
                "contributors": list(commit.contributors),
                "batches": dict(batches),
                "retries": retries,
                "verdict": commit.verdict.value,
                "replayed": False,
                "incarnation": incarnation,
                "t_begin": began,
                "t_produced": produced,
                "t_reduced": reduced,
                "t_commit": committed,
                "t_updated": updated,
                "stall_ms": self.stall_ms,
                "loss": loss,
                "tokens": tokens,
                "tokens_per_s": self.tokens_per_s,
            },
        )

    def replayed(
        self,
        *,
        step: int,
        epoch: EpochId,
        verdict: Verdict,
        contributors: tuple[str, ...],
        incarnation: int,
        began: float,
        updated: float,
        loss: float | None,
        tokens: int,
    ) -> None:
        """A step that others committed and this replica applied while it caught up."""
        self.loss = loss
        self._journal.write(
            "step",
            {
                "step": step,
                "term": epoch.term.number,
                "epoch": epoch.number,
                "contributors": list(contributors),
                "retries": 0,
                "verdict": verdict.value,
                "replayed": True,
                "incarnation": incarnation,
                "t_begin": began,
                "t_updated": updated,
                "loss": loss,
                "tokens": tokens,
            },
        )

    def ended(
        self, *, step: int, exit_code: int, reason: str, incarnation: int, params_digest: str, optimizer_digest: str
    ) -> None:
        self._journal.write(
            "end",
            {
                "step": step,
                "exit_code": exit_code,
                "reason": reason,
                "incarnation": incarnation,
                "params_digest": params_digest,
                "optimizer_digest": optimizer_digest,
            },
        )
