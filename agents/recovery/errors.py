"""What supervision says when it cannot do what it was asked.

SupervisionError            every error below
├── UnknownReplica          this agent supervises no replica of that name
└── SupervisionUnavailable  a state directory or socket cannot be used (another agent runs, path too long, ...)

`code` is one of agents.api's ERROR_CODES; `thing`, `reason` and `hint` are shown to the user as they are.
"""

from __future__ import annotations


class SupervisionError(Exception):
    code = "failed"

    def __init__(self, thing: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{thing}: {reason}")
        self.thing = thing
        self.reason = reason
        self.hint = hint


class UnknownReplica(SupervisionError):
    code = "unknown-replica"


class SupervisionUnavailable(SupervisionError):
    code = "failed"
