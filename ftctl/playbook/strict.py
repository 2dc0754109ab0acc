"""What all parts of a playbook's schema are made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

from ftctl import durations


def _duration(value: Any) -> float:
    if isinstance(value, str):
        return durations.parse(value)
    raise ValueError(f"{value!r} is no duration (write 500ms, 20s, 2m or 1h30m)")


_DURATION_SCHEMA = {"type": "string", "pattern": r"^(\d+(\.\d+)?(ms|s|m|h|d))+$", "examples": ["500ms", "20s", "1h30m"]}
Duration = Annotated[float, BeforeValidator(_duration), WithJsonSchema(_DURATION_SCHEMA)]


class Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True, populate_by_name=False
    )
