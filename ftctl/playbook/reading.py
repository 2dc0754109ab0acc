"""From a file to a Playbook: bounded YAML, variables, the schema. Every complaint names file and line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ftctl.errors import UsageProblem
from ftctl.playbook.checking import notes, problems
from ftctl.playbook.schema import VERBS, Playbook, Scalar
from ftctl.yamlfile import line_of, read_tree

MAX_BYTES = 256 * 1024
MAX_FILES = 1000
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[a-z0-9_]+)\}|(?P<plain>[a-z_][a-z0-9_]*)|(?P<dollar>\$)|(?P<bad>))")
_MARKS = frozenset(VERBS)  # of pydantic's path, those parts name the kind of action and stand in no file


@dataclass(frozen=True)
class Loaded:
    """`notes`: what is allowed and seldom meant, each a line for people."""

    path: Path
    playbook: Playbook
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.playbook.name


def find(paths: Sequence[Path]) -> list[Path]:
    """The files meant: those named, and of directories all *.yaml and *.yml below. Raises UsageProblem."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in (".yaml", ".yml") and p.is_file())
            if not inside:
                raise UsageProblem(str(path), "there is no playbook in it (*.yaml)", "ftctl chaos init FILE")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise UsageProblem(str(path), "is not there", "ftctl chaos list")
    unique = list(dict.fromkeys(found))
    if len(unique) > MAX_FILES:
        raise UsageProblem("playbooks", f"{len(unique)} files are more than {MAX_FILES}")
    return unique


def load(path: Path, variables: Mapping[str, str] | None = None) -> Loaded:
    """Raises UsageProblem."""
    tree = read_tree(path, max_bytes=MAX_BYTES, what="playbook", aliases=False)
    values = _variables(path, tree, variables or {})
    filled = {
        key: value if key in ("vars", "version") else _fill(path, tree, value, values, (key,))
        for key, value in tree.items()
    }
    filled["vars"] = values
    try:
        playbook = Playbook.model_validate(filled)
    except ValidationError as error:
        raise _complaint(path, tree, error) from None
    for where, text in problems(playbook):
        raise UsageProblem(f"{path}:{line_of(tree, where)}", text, "ftctl inject --help   lists faults and parameters")
    return Loaded(path, playbook, tuple(f"{path}:{line_of(tree, where)}: {text}" for where, text in notes(playbook)))


def variables_of(pairs: Sequence[str]) -> dict[str, str]:
    """`--var victim=r2` as a mapping. Raises UsageProblem."""
    found = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise UsageProblem(f"--var {pair}", "NAME=VALUE is expected", "for example --var victim=r2")
        found[name] = value
    return found


def _variables(path: Path, tree: Mapping[Any, Any], given: Mapping[str, str]) -> dict[str, Scalar]:
    own = tree.get("vars", {})
    if not isinstance(own, dict):
        raise UsageProblem(f"{path}:{line_of(tree, ('vars',))}", "`vars` is a mapping of names to values")
    values: dict[str, Scalar] = {}
    for name, value in own.items():
        if not isinstance(name, str) or not re.fullmatch(r"[a-z_][a-z0-9_]*", name):
            raise UsageProblem(
                f"{path}:{line_of(tree, ('vars', name))}", f"{name!r} cannot be a variable's name (a-z 0-9 _)"
            )
        if not isinstance(value, bool | int | float | str):
            raise UsageProblem(
                f"{path}:{line_of(tree, ('vars', name))}", f"variable {name}: a number or a text is expected"
            )
        if isinstance(value, str) and (inner := _VARIABLE.search(value)) and not inner["dollar"]:
            raise UsageProblem(
                f"{path}:{line_of(tree, ('vars', name))}",
                f"variable {name}: `{value}` has another one in it; none is made of others ($$ is a $)",
            )
        values[name] = value.replace("$$", "$") if isinstance(value, str) else value
    for name, text in given.items():
        if name not in values:
            known = ", ".join(values) or "none"
            raise UsageProblem(f"--var {name}", f"{path} has no such variable (it has: {known})")
        values[name] = _scalar(text)
    return values


def _scalar(text: str) -> Scalar:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text


def _fill(path: Path, tree: Any, value: Any, values: Mapping[str, Scalar], where: tuple[str | int, ...]) -> Any:
    """The value with its variables replaced. A text that is one variable and nothing else keeps the variable's type."""
    if isinstance(value, dict):
        return {key: _fill(path, tree, inner, values, (*where, key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill(path, tree, inner, values, (*where, index)) for index, inner in enumerate(value)]
    if not isinstance(value, str) or "$" not in value:
        return value

    def replace(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        name = match["braced"] or match["plain"]
        if name is None:
            raise UsageProblem(
                f"{path}:{line_of(tree, where)}", f"`{value}`: a variable's name is expected after $ ($$ is a $)"
            )
        if name not in values:
            known = ", ".join(values) or "none"
            raise UsageProblem(
                f"{path}:{line_of(tree, where)}", f"`${name}`: there is no such variable (there are: {known})"
            )
        return str(values[name])

    whole = _VARIABLE.fullmatch(value)
    if whole and (name := whole["braced"] or whole["plain"]) in values:
        return values[name]
    return _VARIABLE.sub(replace, value)


def _complaint(path: Path, tree: Any, error: ValidationError) -> UsageProblem:
    first = error.errors()[0]
    where = _in_file(tree, first["loc"])
    name = ".".join(str(part) for part in where) or "the playbook"
    message = first["msg"].removeprefix("Value error, ")
    # Of a value that may be of several types there is an error for each.
    tried = {other["type"] for other in error.errors() if other["loc"][:-1] == first["loc"][:-1]}
    if "finite_number" in tried:
        message = "a finite number is expected"
    elif tried > {"bool_type"}:
        message = "a number or a text is expected"
    reason = {
        "extra_forbidden": f"unknown key `{where[-1] if where else ''}`{_known(where[:-1])}",
        "missing": f"`{name}` is missing",
        "no_verb": f"`{name}`: {message}",
    }.get(first["type"], f"`{name}`: {message[:1].lower()}{message[1:]}")
    return UsageProblem(f"{path}:{line_of(tree, where)}", reason, "ftctl chaos schema   says what a playbook may hold")


def _in_file(tree: Any, loc: tuple[int | str, ...]) -> tuple[str | int, ...]:
    """pydantic's path without the parts that name which kind of action, or which of several types, was tried."""
    where: list[str | int] = []
    for index, part in enumerate(loc):
        here = tree
        try:
            here = tree[part]
        except (KeyError, IndexError, TypeError):
            if index < len(loc) - 1:
                continue  # a mark of pydantic's own
            if isinstance(part, str) and ("[" in part or part in ("int", "str", "float", "bool")):
                continue
            where.append(part)
            break
        if part in _MARKS and index and isinstance(loc[index - 1], int) and index < len(loc) - 1:
            continue  # the mark of an action: its verb is a key too, and what follows is a key beside it
        where.append(part)
        tree = here
    return tuple(where)


def _known(where: tuple[str | int, ...]) -> str:
    if not where:
        return f" (known: {', '.join(Playbook.model_fields)})"
    field = Playbook.model_fields.get(str(where[0]))
    inner = getattr(field, "annotation", None)
    fields = getattr(inner, "model_fields", None)
    return f" (known: {', '.join(f.alias or n for n, f in fields.items())})" if fields and len(where) == 1 else ""
