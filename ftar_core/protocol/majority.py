"""Who is right, when what should be equal differs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

Voter = TypeVar("Voter")


def outvoted(votes: Mapping[Voter, Hashable]) -> tuple[list[Voter], bool]:
    """Those who differ from more than half of at least three, and that this is clear. All of them, and that it is not,
    where no value has such a majority. Nobody, where all are equal."""
    groups: dict[Hashable, list[Voter]] = {}
    for voter, value in votes.items():
        groups.setdefault(value, []).append(voter)
    if len(groups) < 2:
        return [], True
    first, *others = sorted(groups.values(), key=len, reverse=True)
    clear = len(votes) >= 3 and 2 * len(first) > len(votes)
    return [voter for group in (others if clear else [first, *others]) for voter in group], clear
