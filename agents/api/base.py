"""What all answers and requests have in common (models.py has the routes), and the codes of errors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

API_VERSION = 1
DEFAULT_PORT = 7610


class Answer(BaseModel):
    """An answer of the agent; a newer agent may say more."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Request(BaseModel):
    """A request to the agent; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _can_be_written_down(cls, data: Any) -> Any:
        """JSON can spell half a character ("\\ud800"), which no file and no answer can hold."""
        if _half_a_character(data):
            raise ValueError("a text in it has half a character (a lone surrogate)")
        return data


def _half_a_character(data: Any) -> bool:
    if isinstance(data, str):
        return any("\ud800" <= letter <= "\udfff" for letter in data)
    if isinstance(data, dict):
        return any(_half_a_character(part) for pair in data.items() for part in pair)
    return isinstance(data, list) and any(map(_half_a_character, data))


class ErrorBody(Answer):
    """Every error of the agent. `code` is stable (ERROR_CODES); the three texts are shown to the user as they are."""

    code: str
    thing: str  # what it is about: "node1/rail7", "fault f-12ab"
    reason: str
    hint: str = ""  # the next command
    details: dict[str, Any] = Field(default_factory=dict)


# code -> (HTTP status, ftctl exit code)
ERROR_CODES: dict[str, tuple[int, int]] = {
    "bad-request": (422, 2),
    "unauthorized": (401, 2),
    "forbidden": (403, 7),
    "unknown-nic": (404, 2),
    "unknown-fault": (404, 2),
    "unknown-replica": (404, 2),
    "unknown-kind": (404, 2),
    "not-found": (404, 2),
    "bad-duration": (422, 2),
    "refused": (409, 7),  # by a guard: not a rail, already faulted, last healthy replica
    "conflict": (409, 1),  # not in a state for this
    "faults-disabled": (403, 7),
    "unsupported": (501, 1),  # this kernel or machine cannot
    "ledger": (507, 1),  # the undo could not be written: nothing was injected
    "coordinator": (502, 1),  # not reachable, or it failed
    "no-coordinator": (404, 1),  # none is configured: a job that needs none, or an agent of another one
    "failed": (500, 1),
    "in-force": (500, 5),  # a fault may still be in force
}
