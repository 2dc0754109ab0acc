"""What a mistyped name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SHOWN = 3
FEW = 6


def names(wrong: str, known: Iterable[str]) -> list[str]:
    """The nearest known names, the best first; none where nothing is near."""
    return difflib.get_close_matches(wrong, sorted(set(known)), n=SHOWN, cutoff=0.5)


def among(wrong: str, known: Iterable[str]) -> str:
    """`known: r0, r1`, all where they are few; of many the nearest ones, or how many there are."""
    every = sorted(set(known))
    if len(every) <= FEW:
        return f"known: {', '.join(every) or 'none'}"
    if near := names(wrong, every):
        return f"nearest: {', '.join(near)}"
    return f"known: {', '.join(every[:FEW])} and {len(every) - FEW} more"
