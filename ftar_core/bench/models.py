"""The example's model in the sizes that benchmarks take, and the options that go with them."""

from __future__ import annotations

import argparse
from typing import Any

from ftar_core.bench.report import UsageError

SHAPES: dict[str, dict[str, int]] = {  # of the example's model: gradients of 4, 26 and 101 MB
    "example": {},
    "26MB": {"layers": 4, "heads": 4, "width": 360},
    "101MB": {"layers": 8, "heads": 4, "width": 512},
}
PACED: dict[str, dict[str, int]] = {  # of paced replicas
    "example": {},
    "small": {"layers": 2, "heads": 2, "width": 64},  # 0.6 MB: it computes far less than its pace, if that is short
}


def checked(options: Any, *counts: str) -> argparse.Namespace:
    """`models` as a list, and these counts within reason. Raises UsageError."""
    options.models = [name.strip() for name in options.models.split(",")]
    for name in options.models:
        if name not in SHAPES:
            raise UsageError(f"--models: there is no {name!r}; there are {', '.join(SHAPES)}")
    for count in counts:
        if not 1 <= getattr(options, count) <= 100_000:
            raise UsageError(f"--{count}: from 1 to 100000")
    parsed: argparse.Namespace = options
    return parsed
