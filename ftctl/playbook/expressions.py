"""The conditions of a playbook: `replicas.contributing == 3`, `replica.r1.state == contributing and job.step >= 50`.

A condition is comparisons of a fact with a value, joined by `and`, or by `or`; not both, so that nobody has to know
which binds tighter. There is nothing to execute in it: facts are looked up by name (facts.py), values are numbers,
words or "quoted texts". A condition about something that is not known is not met, and says so.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Value = bool | int | float | str
MAX_TEXT = 500

_TOKEN = re.compile(
    r"\s*(?:(?P<op>==|!=|<=|>=|<|>)|(?P<text>\"[^\"]*\"|'[^']*')|(?P<word>[A-Za-z0-9_./:%+-]+(?:\{[^{}]*\})?))"
)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class ExpressionError(ValueError):
    """The text is no condition; the message says what is expected."""


@dataclass(frozen=True)
class Comparison:
    fact: str
    op: str
    value: Value

    def __str__(self) -> str:
        return f"{self.fact} {self.op} {self.value}"


@dataclass(frozen=True)
class Expression:
    """`joined` is "and" or "or"; of one comparison it says nothing."""

    comparisons: tuple[Comparison, ...]
    joined: str = "and"

    def __str__(self) -> str:
        return f" {self.joined} ".join(map(str, self.comparisons))


@dataclass(frozen=True)
class Finding:
    """Is the condition met? `sentence` says what was found, such as "replicas.contributing is 2"."""

    met: bool
    sentence: str


class Unknown(Exception):
    """A fact that cannot be told; the message says why."""


def parse(text: object) -> Expression:
    """Raises ExpressionError."""
    if not isinstance(text, str) or not text.strip():
        raise ExpressionError("a condition is expected, such as `replicas.contributing == 3`")
    if len(text) > MAX_TEXT:
        raise ExpressionError(f"a condition longer than {MAX_TEXT} characters")
    tokens = _tokens(text)
    found: list[Comparison] = []
    joints: list[str] = []
    while True:
        piece, tokens = tokens[:3], tokens[3:]
        if [kind for kind, _ in piece[:2]] != ["word", "op"] or len(piece) < 3 or piece[2][0] == "op":
            got = " ".join(word for _, word in piece) or "nothing"
            raise ExpressionError(f"`FACT OPERATOR VALUE` is expected, such as `job.step >= 50`, not `{got}`")
        found.append(Comparison(piece[0][1], piece[1][1], _value(*piece[2])))
        if not tokens:
            break
        kind, joint = tokens.pop(0)
        if kind != "word" or joint not in ("and", "or"):
            raise ExpressionError(f"`and` or `or` is expected between two comparisons, not `{joint}`")
        joints.append(joint)
    if len(set(joints)) > 1:
        raise ExpressionError("`and` and `or` in one condition: write two conditions")
    for comparison in found:
        if comparison.op in _COMPARE and isinstance(comparison.value, str | bool):
            raise ExpressionError(f"`{comparison}`: {comparison.op} needs a number")
    return Expression(tuple(found), joints[0] if joints else "and")


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, at, text = [], 0, text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ExpressionError(f"`{text[at:].strip()[:20]}` is not understood")
        kind = match.lastgroup or ""
        tokens.append((kind, match[kind]))
        at = match.end()
    return tokens


def _value(kind: str, text: str) -> Value:
    if kind == "text":
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def evaluate(expression: Expression, look_up: Callable[[str], Value]) -> Finding:
    """`look_up(fact)` returns its value now or raises Unknown."""
    findings = [_compare(comparison, look_up) for comparison in expression.comparisons]
    met = any(f.met for f in findings) if expression.joined == "or" else all(f.met for f in findings)
    told = findings if met else [f for f in findings if not f.met]
    return Finding(met, ", ".join(dict.fromkeys(f.sentence for f in told)))


def _compare(comparison: Comparison, look_up: Callable[[str], Value]) -> Finding:
    try:
        actual = look_up(comparison.fact)
    except Unknown as unknown:
        return Finding(False, str(unknown))
    return Finding(_holds(actual, comparison.op, comparison.value), f"{comparison.fact} is {_shown(actual)}")


def _holds(actual: Value, op: str, wanted: Value) -> bool:
    if op in _COMPARE:
        if isinstance(actual, str) or isinstance(wanted, str):
            return False
        return _COMPARE[op](actual, wanted)
    same = actual == wanted if isinstance(actual, str) == isinstance(wanted, str) else str(actual) == str(wanted)
    return same == (op == "==")


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def from_mapping(facts: Mapping[str, Value]) -> Callable[[str], Value]:
    """A look-up in a mapping, for tests and for facts that were written down."""

    def look_up(fact: str) -> Value:
        try:
            return facts[fact]
        except KeyError:
            raise Unknown(f"{fact} is not known") from None

    return look_up
