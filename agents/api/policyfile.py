"""A policy file, read and checked: unknown keys, wrong values and rules that never decide are named with their line.

Both sides read it so: the agent that decides by it, and `ftctl policy validate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

DEFAULT = Path(__file__).parent.parent / "policies" / "default.yaml"
MAX_BYTES = 256 * 1024
ACTIONS = ("watch", "restart", "drain", "promote", "evict", "rejoin")
OUT = ("drain", "promote", "evict")  # the replica is out afterwards, until it rejoins
MODES = ("observe", "recommend", "act")
MAX_RULES, MAX_WORDS, MAX_HOOK_S = 200, 64, 600.0
HEALTHS = ("healthy", "degraded", "unhealthy", "unknown")


class PolicyProblem(Exception):
    """The file cannot be used; the text says where and why."""


@dataclass(frozen=True)
class Rule:
    """An empty tuple or string fits everything. `at_least`: so often within `within_s` seconds. `cordon`: the node is
    set apart as well, until the replica rejoins. `hook`: a command that is run besides, ended after `timeout_s`."""

    name: str
    action: str
    kind: str = ""
    codes: tuple[str, ...] = ()
    health: tuple[str, ...] = ()
    suggests: tuple[str, ...] = ()
    at_least: int = 1
    within_s: float = 0.0
    cordon: bool = False
    hook: tuple[str, ...] = ()
    timeout_s: float = 30.0
    line: int = 0


@dataclass(frozen=True)
class Limits:
    cooldown_s: float = 30.0
    max_acts: int = 3
    window_s: float = 3600.0
    max_share: float = 0.34
    rejoin_after_s: float = 2.0


@dataclass(frozen=True)
class Policy:
    rules: tuple[Rule, ...]
    limits: Limits = field(default_factory=Limits)


def read(path: Path = DEFAULT) -> Policy:
    """Raises PolicyProblem, whose message names the file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise PolicyProblem(f"{path}: more than {MAX_BYTES} bytes")
        return parse(data.decode(), str(path))
    except OSError as error:
        raise PolicyProblem(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PolicyProblem(f"{path}: not UTF-8 text") from None


def parse(text: str, name: str = "policy") -> Policy:
    try:
        document: Any = YAML(typ="rt").load(text)
    except (YAMLError, ValueError, RecursionError) as error:
        raise PolicyProblem(f"{name}: not YAML: {' '.join(str(error).split())[:300]}") from None
    top = _mapping(document, f"{name}:1", name, ("version", "limits", "rules"))
    if top.get("version") != 1:
        raise PolicyProblem(f"{name}:1: version must be 1")
    limits = _limits(top.get("limits", {}), name)
    entries = top.get("rules")
    if not isinstance(entries, list) or not entries:
        raise PolicyProblem(f"{name}:1: rules must be a list of at least one rule")
    if len(entries) > MAX_RULES:
        raise PolicyProblem(f"{name}:1: more than {MAX_RULES} rules")
    marks: Any = entries  # ruamel keeps the lines in `lc`
    rules = tuple(_rule(entry, f"{name}:{marks.lc.item(i)[0] + 1}", name) for i, entry in enumerate(entries))
    for i, rule in enumerate(rules):
        for earlier in rules[:i]:
            if earlier.name == rule.name:
                raise PolicyProblem(f"{name}:{rule.line}: a rule {rule.name} is on line {earlier.line} already")
            if _covers(earlier, rule):
                word = "overlaps" if earlier.action == rule.action else "contradicts"
                raise PolicyProblem(
                    f"{name}:{rule.line}: rule {rule.name} {word} {earlier.name} on line {earlier.line},"
                    " which fits first in every case"
                )
    return Policy(rules, limits)


def _mapping(value: Any, where: str, name: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PolicyProblem(f"{where}: a mapping of {', '.join(known)} is expected")
    marks: Any = value
    for key in value:
        if key not in known:
            raise PolicyProblem(f"{name}:{marks.lc.key(key)[0] + 1}: unknown key {key!r}; known: {', '.join(known)}")
    return value


def _number(value: Any, where: str, key: str, low: float, high: float) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise PolicyProblem(f"{where}: {key} must be a number from {low:g} to {high:g}")
    return float(value)


def _whole(value: Any, where: str, key: str) -> int:
    if not isinstance(value, int):
        raise PolicyProblem(f"{where}: {key} must be a whole number")
    return int(_number(value, where, key, 1, 1000))


def _limits(value: Any, name: str) -> Limits:
    got = _mapping(
        value, f"{name}: limits", name, ("cooldown_s", "max_acts", "window_s", "max_share", "rejoin_after_s")
    )
    where, base = f"{name}: limits", Limits()
    return Limits(
        _number(got.get("cooldown_s", base.cooldown_s), where, "cooldown_s", 0, 86400),
        _whole(got.get("max_acts", base.max_acts), where, "max_acts"),
        _number(got.get("window_s", base.window_s), where, "window_s", 1, 604800),
        _number(got.get("max_share", base.max_share), where, "max_share", 0, 1),
        _number(got.get("rejoin_after_s", base.rejoin_after_s), where, "rejoin_after_s", 0, 86400),
    )


def _rule(value: Any, where: str, name: str) -> Rule:
    keys = (
        "name",
        "action",
        "kind",
        "codes",
        "health",
        "suggests",
        "at_least",
        "within_s",
        "cordon",
        "hook",
        "timeout_s",
    )
    got = _mapping(value, where, name, keys)
    for key in ("name", "action"):
        if not isinstance(got.get(key), str) or not got[key]:
            raise PolicyProblem(f"{where}: {key} is missing or not a word")
    if got["action"] not in ACTIONS:
        raise PolicyProblem(f"{where}: action {got['action']!r} is none of {', '.join(ACTIONS)}")
    if not isinstance(got.get("kind", ""), str):
        raise PolicyProblem(f"{where}: kind must be a word")
    at_least = _whole(got.get("at_least", 1), where, "at_least")
    within = _number(got.get("within_s", 0), where, "within_s", 0, 604800)
    if (at_least > 1) != (within > 0):
        raise PolicyProblem(f"{where}: at_least above 1 and within_s go together")
    words = {key: _words(got.get(key, []), where, key) for key in ("codes", "health", "suggests")}
    for health in words["health"]:
        if health not in HEALTHS:
            raise PolicyProblem(f"{where}: health {health!r} is none of {', '.join(HEALTHS)}")
    cordon = got.get("cordon", False)
    if not isinstance(cordon, bool) or (cordon and got["action"] not in OUT):
        raise PolicyProblem(f"{where}: cordon must be true or false, and goes with {', '.join(OUT)} only")
    hook = _words(got.get("hook", []), where, "hook")
    if hook and not hook[0].startswith("/"):
        raise PolicyProblem(f"{where}: hook must begin with the whole path of a program, not {hook[0]!r}")
    if "timeout_s" in got and not hook:
        raise PolicyProblem(f"{where}: timeout_s belongs to a hook, and there is none")
    return Rule(
        got["name"],
        got["action"],
        got.get("kind", ""),
        **words,
        at_least=at_least,
        within_s=within,
        cordon=cordon,
        hook=hook,
        timeout_s=_number(got.get("timeout_s", 30), where, "timeout_s", 0.1, MAX_HOOK_S),
        line=int(where.rsplit(":", 1)[1]),
    )


def _words(value: Any, where: str, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        raise PolicyProblem(f"{where}: {key} must be a list of words")
    if len(value) > MAX_WORDS:
        raise PolicyProblem(f"{where}: {key} has more than {MAX_WORDS} words")
    return tuple(value)


def _covers(a: Rule, b: Rule) -> bool:
    """Whether everything that fits `b` fits `a`."""
    return (
        a.kind in ("", b.kind)
        and (not a.codes or (bool(b.codes) and all(any(fnmatchcase(c, p) for p in a.codes) for c in b.codes)))
        and (not a.health or (bool(b.health) and set(b.health) <= set(a.health)))
        and (not a.suggests or (bool(b.suggests) and set(b.suggests) <= set(a.suggests)))
        and (a.at_least == 1 or (a.at_least <= b.at_least and a.within_s >= b.within_s))
    )
