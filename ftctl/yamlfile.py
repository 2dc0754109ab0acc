"""Reads a YAML file that a person wrote: bounded, and with the line of every key, so that a complaint can name it."""

from __future__ import annotations

import json
import os
import select
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

from ftctl.errors import UsageProblem

MAX_DEPTH = 32
PIPE_S = 5.0  # for whoever writes into a pipe, such as <(command)


def read_tree(path: Path, *, max_bytes: int, what: str, aliases: bool = True) -> dict[Any, Any]:
    """The file's mapping, as ruamel's round-trip tree. Raises UsageProblem with the file, and the line if there is one.

    `what` is an "inventory" or a "playbook". Without `aliases` a file that has any is refused: a few lines of them can
    stand for gigabytes.
    """
    try:
        raw = _bytes(path, max_bytes + 1)
    except OSError as error:
        raise UsageProblem(str(path), error.strerror or str(error)) from None
    if len(raw) > max_bytes:
        raise UsageProblem(str(path), f"larger than {max_bytes} bytes, so it is no {what}")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageProblem(str(path), "not UTF-8 text") from None
    if (quick := _json(text)) is not None:
        return quick
    try:
        if not aliases:
            _no_bombs(path, text)
        tree = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise UsageProblem(place, f"not YAML: {error.problem or error.context}") from None
    except (YAMLError, RecursionError, ValueError) as error:
        raise UsageProblem(str(path), f"not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(tree, dict):
        raise UsageProblem(
            f"{path}:1", f"a mapping is expected, as {'an' if what[0] in 'aeiou' else 'a'} {what} has it"
        )
    return tree


def _bytes(path: Path, most: int) -> bytes:
    """Raises OSError, and UsageProblem for a pipe that stays silent."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = b""
    with os.fdopen(handle, "rb", buffering=0) as file:
        while len(found) < most:
            if not select.select([file], [], [], PIPE_S)[0]:
                raise UsageProblem(str(path), f"nothing came out of it within {PIPE_S:g} s")
            piece = file.read(most - len(found))
            if piece == b"":
                break
            found += piece or b""
    return found


def _json(text: str) -> JsonTree | None:
    """A file in JSON, which is YAML too, and read in a hundredth of the time; None if it is none."""
    if not text.startswith("{"):
        return None
    try:
        tree = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return None  # the YAML reader says what is wrong, and where
    found = JsonTree(tree)
    found.text = text
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


class JsonTree(dict[Any, Any]):
    """As it was read, and its text: only a complaint needs to know lines."""

    text: str = ""


def _no_bombs(path: Path, text: str) -> None:
    """Raises UsageProblem for aliases and for nesting that nobody writes."""
    depth = 0
    for event in YAML().parse(text):
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent):
            raise UsageProblem(
                f"{path}:{line}", f"aliases (*{event.anchor}) are not understood here", "use vars instead"
            )
        if isinstance(event, CollectionStartEvent):
            depth += 1
        elif isinstance(event, CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise UsageProblem(f"{path}:{line}", f"nested deeper than {MAX_DEPTH}")


def line_of(tree: Any, where: tuple[str | int, ...]) -> int:
    """The line (from 1) of a key in the tree, or of its nearest parent that exists."""
    line = 1
    if isinstance(tree, JsonTree):
        tree = YAML(typ="rt").load(tree.text)
    for part in where:
        try:
            line = tree.lc.data[part][0] + 1
            tree = tree[part]
        except (AttributeError, KeyError, IndexError, TypeError):
            break
    return line
