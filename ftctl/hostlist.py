"""Hostlists, as operators know them from Slurm: `node[0-3,7]` is node0 node1 node2 node3 node7.

A list is names separated by commas or white space; a bracket holds numbers and ranges, with leading zeros kept
(`n[08-11]` is n08 n09 n10 n11). Several brackets multiply. Bounded, because one typing error ([0-99999999]) should be
an error message and not a full memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_NAMES = 65536
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?\Z", re.ASCII)


class HostlistError(ValueError):
    """The text is not a hostlist; the message says where."""


def expand(text: str) -> list[str]:
    """The names in the order written, each once. Raises HostlistError."""
    names: dict[str, None] = {}
    for part in _split(text):
        for name in _expand_one(part):
            names[name] = None
            if len(names) > MAX_NAMES:
                raise HostlistError(f"{text!r}: more than {MAX_NAMES} names")
    if not names:
        raise HostlistError(f"{text!r}: no names in it")
    return list(names)


def fold(names: Iterable[str]) -> str:
    """The other way: node0 node1 node2 mgmt is `node[0-2],mgmt`. Names that differ in their last number share brackets
    where it has as many digits in each."""
    groups: dict[tuple[str, int], list[int]] = {}
    for name in names:
        digits = name[len(name.rstrip("0123456789")) :][-9:]
        groups.setdefault((name[: len(name) - len(digits)], len(digits)), []).append(int(digits or 0))
    return ",".join(_fold_one(stem, width, numbers) for (stem, width), numbers in groups.items())


def _fold_one(stem: str, width: int, numbers: list[int]) -> str:
    if not width:
        return stem
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    words = [f"{a:0{width}}" if a == b else f"{a:0{width}}-{b:0{width}}" for a, b in ranges]
    single = len(words) == 1 and "-" not in words[0]
    return stem + (words[0] if single else f"[{','.join(words)}]")


def _split(text: str) -> list[str]:
    """Split at commas and white space outside brackets."""
    parts = [""]
    depth = 0
    for character in text:
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        if depth not in (0, 1):
            raise HostlistError(f"{text!r}: brackets do not match")
        if depth == 0 and (character == "," or character.isspace()):
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        raise HostlistError(f"{text!r}: a bracket is not closed")
    return [part for part in parts if part]


def _expand_one(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    tails = _expand_one(after) if after else [""]
    names: list[str] = []
    for item in inside.split(","):
        match = _RANGE.match(item.strip())
        if match is None:
            raise HostlistError(f"{part!r}: {item!r} is not a number or a range like 0-3")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise HostlistError(f"{part!r}: the range {item} runs backwards")
        if (int(last) - int(first) + 1) * len(tails) + len(names) > MAX_NAMES:
            raise HostlistError(f"{part!r}: more than {MAX_NAMES} names")
        numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        names += [f"{before}{number}{tail}" for number in numbers for tail in tails]
    return names
