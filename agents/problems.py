"""One error for everything the HTTP routes refuse, in the words of the published contract."""

from __future__ import annotations

from typing import Any

from agents.api.models import ERROR_CODES, ErrorBody


class ApiProblem(Exception):
    """`code` is one of ERROR_CODES, which says the HTTP status."""

    def __init__(
        self, code: str, thing: str, reason: str, hint: str = "", *, details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(f"{thing}: {reason}")
        self.body = ErrorBody(code=code, thing=thing, reason=reason, hint=hint, details=details or {})

    @property
    def status(self) -> int:
        return ERROR_CODES[self.body.code][0]
