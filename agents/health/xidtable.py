"""The Xid table (xids.yaml) and an operator's changes to it, read and checked by line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from agents.api.words import Action, Health
from agents.health.signals import QUIET_S, Ends, Repeat

SHIPPED = Path(__file__).with_name("xids.yaml")
MAX_BYTES = 256 * 1024
MAX_CODE = 65_535
NAMED = 0  # follows the Xid that its line names

_TOP = ("version", "edition", "xids")
_ROW = ("codes", "meaning", "class", "nvidia", "health", "action", "ends", "quiet_s", "repeat", "fatal", "follows",
        "if_died", "recovery")  # fmt: skip
_REPEAT = ("times", "within_s", "of", "action")


class XidTableProblem(Exception):
    """The table cannot be used; the text says where and why."""


@dataclass(frozen=True)
class XidRow:
    """One code; the keys are explained at the head of xids.yaml. `unit`: `repeat` counts each unit of the GPU."""

    code: int
    meaning: str
    health: Health
    action: Action
    sort: str = ""  # the key `class`
    nvidia: str = ""
    ends: Ends | None = None  # none: by its health
    quiet_s: float = QUIET_S
    repeat: Repeat | None = None
    unit: bool = False
    fatal: Action | None = None
    follows: int | None = None
    if_died: bool = False
    recovery: tuple[Action, ...] = ()


@dataclass(frozen=True)
class XidTable:
    edition: str
    rows: dict[int, XidRow]

    def row(self, code: int) -> XidRow | None:
        return self.rows.get(code)


def read(override: Path | None = None) -> XidTable:
    """The shipped table with the changes of `override`. Raises XidTableProblem."""
    edition, rows = _file(SHIPPED, {})
    if override is not None:
        theirs, rows = _file(override, rows)
        edition = f"{edition}, changed by {override}" + (f" ({theirs})" if theirs else "")
    return XidTable(edition, rows)


def _file(path: Path, base: dict[int, XidRow]) -> tuple[str, dict[int, XidRow]]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise XidTableProblem(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise XidTableProblem(f"{path}: not UTF-8 text") from None
    if len(data) > MAX_BYTES:
        raise XidTableProblem(f"{path}: more than {MAX_BYTES} bytes")
    return parse(text, str(path), base)


def parse(text: str, name: str, base: dict[int, XidRow]) -> tuple[str, dict[int, XidRow]]:
    """The edition and all rows: those of `base` as the text changes them."""
    try:
        document: Any = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        raise XidTableProblem(f"{where}: not YAML: {error.problem or error.context}") from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise XidTableProblem(f"{name}: not YAML: {' '.join(str(error).split())[:300]}") from None
    top = _Part(document, f"{name}:1", name, _TOP)
    if top.get("version") != 1:
        raise XidTableProblem(f"{name}:1: version must be 1")
    entries = top.get("xids")
    if not isinstance(entries, list) or not entries:
        raise XidTableProblem(f"{name}:1: xids must be a list of at least one row")
    rows, lines = dict(base), dict[int, int]()
    marks: Any = entries
    for number, entry in enumerate(entries):
        line = marks.lc.item(number)[0] + 1
        part = _Part(entry, f"{name}:{line}", name, _ROW)
        for code in part.codes():
            if code in lines:
                part.refuse(f"Xid {code} is on line {lines[code]} already")
            lines[code] = line
            rows[code] = _row(part, code, base.get(code))
    return str(top.get("edition", "")), rows


class _Part:
    """A mapping of the file, whose complaints name its line."""

    def __init__(self, value: Any, where: str, name: str, known: tuple[str, ...]) -> None:
        self.where, self.name = where, name
        if not isinstance(value, dict):
            self.refuse(f"a mapping of {', '.join(known)} is expected")
        self._value: Any = value
        for key in value:
            if key not in known:
                line = self._value.lc.key(key)[0] + 1
                raise XidTableProblem(f"{name}:{line}: unknown key {str(key)[:60]!r}; known: {', '.join(known)}")

    def refuse(self, text: str) -> None:
        raise XidTableProblem(f"{self.where}: {text}")

    def get(self, key: str, default: Any = None) -> Any:
        return self._value.get(key, default)

    def has(self, key: str) -> bool:
        return key in self._value

    def part(self, key: str, known: tuple[str, ...]) -> _Part:
        return _Part(self.get(key), f"{self.where}: {key}", self.name, known)

    def codes(self) -> list[int]:
        codes = self.get("codes")
        good = isinstance(codes, list) and codes and all(_whole(code, 1, MAX_CODE) for code in codes)
        if not good:
            self.refuse(f"codes must be a list of numbers from 1 to {MAX_CODE}")
        return [int(code) for code in codes]

    def word(self, key: str, default: str = "") -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or len(value) > 200:
            self.refuse(f"{key} must be a text of at most 200 characters")
        return str(value)

    def number(self, key: str, low: float, high: float, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.refuse(f"{key} must be a number from {low:g} to {high:g}")
        return float(value)

    def action(self, key: str = "action", default: Action | None = None) -> Action:
        return self.choice_action(self.get(key, default), key)

    def choice_action(self, value: Any, key: str) -> Action:
        words = [action.value for action in Action]
        if value not in words:
            self.refuse(f"{key} {value!r} is none of {', '.join(words)}")
        return Action(value)

    def health(self, default: Health | None) -> Health:
        value, words = self.get("health", default), ("healthy", "degraded", "unhealthy")
        if value not in words:
            self.refuse(f"health {value!r} is none of {', '.join(words)}")
        return Health(value)

    def ends(self, default: Ends | None) -> Ends | None:
        value, words = self.get("ends", default), [ends.value for ends in Ends]
        if value is not None and value not in words:
            self.refuse(f"ends {value!r} is none of {', '.join(words)}")
        return Ends(value) if value is not None else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(f"{key} must be true or false")
        return bool(value)


def _row(part: _Part, code: int, base: XidRow | None) -> XidRow:
    if base is None:
        for key in ("meaning", "health", "action"):
            if not part.has(key):
                part.refuse(f"Xid {code} is new, so {key} is needed")
        base = XidRow(code, "", Health.DEGRADED, Action.WATCH)
    row = replace(
        base,
        meaning=part.word("meaning", base.meaning),
        sort=part.word("class", base.sort),
        nvidia=part.word("nvidia", base.nvidia),
        health=part.health(base.health),
        action=part.action("action", base.action),
        ends=part.ends(base.ends),
        quiet_s=part.number("quiet_s", 1, 604_800, base.quiet_s),
        if_died=part.flag("if_died", base.if_died),
        follows=_follows(part, base.follows),
    )
    if part.has("repeat"):
        repeat, unit = _repeat(part)
        row = replace(row, repeat=repeat, unit=unit)
    if part.has("recovery"):
        row = replace(row, recovery=_recovery(part))
    if part.has("fatal"):
        row = replace(row, fatal=part.action("fatal") if part.get("fatal") is not None else None)
    return row


def _follows(part: _Part, default: int | None) -> int | None:
    if not part.has("follows"):
        return default
    value = part.get("follows")
    if value in ("named", None):
        return NAMED if value else None
    if not _whole(value, 1, MAX_CODE):
        part.refuse("follows must be an Xid, or named")
    return int(value)


def _repeat(part: _Part) -> tuple[Repeat | None, bool]:
    if part.get("repeat") is None:
        return None, False
    repeat = part.part("repeat", _REPEAT)
    if repeat.get("of", "gpu") not in ("gpu", "unit"):
        repeat.refuse("of must be gpu or unit")
    times = repeat.get("times", 2)
    if not _whole(times, 2, 16):
        repeat.refuse("times must be a whole number from 2 to 16")
    within_s = repeat.number("within_s", 1, 86_400, 86_400)
    return Repeat(int(times), within_s, repeat.action()), repeat.get("of") == "unit"


def _recovery(part: _Part) -> tuple[Action, ...]:
    value = part.get("recovery")
    if not isinstance(value, list) or not 0 < len(value) <= 32:
        part.refuse("recovery must be a list of actions, by the number of NVML field 230")
    return tuple(part.choice_action(word, "recovery") for word in value)


def _whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
