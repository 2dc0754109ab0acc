"""What was decided and could not be done: looked at again, later each time, and told again only if the answer
differs."""

from __future__ import annotations

from dataclasses import dataclass

from agents.api.health import Verdict

RETRY_S, RETRY_MAX_S = 1.0, 60.0


@dataclass
class Waiting:
    verdict: Verdict
    text: str
    next_s: float
    wait_s: float = RETRY_S

    def later(self, now: float, text: str) -> None:
        self.wait_s = RETRY_S if text != self.text else min(self.wait_s * 2, RETRY_MAX_S)
        self.text, self.next_s = text, now + self.wait_s
