"""Conditions: what they mean, and that no text makes them do anything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftctl.playbook.expressions import ExpressionError, evaluate, from_mapping, parse

FACTS = from_mapping(
    {"job.step": 50, "job.loss": 2.5, "replica.r1.state": "contributing", "replica.r1.straggler": False}
)


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("job.step == 50", True),
        ("job.step >= 50", True),
        ("job.step > 50", False),
        ("job.loss < 2.6", True),
        ("job.loss != 2.5", False),
        ("replica.r1.state == contributing", True),
        ("replica.r1.state == 'contributing'", True),
        ("replica.r1.state != drained", True),
        ("replica.r1.straggler == false", True),
        ("job.step >= 50 and replica.r1.state == contributing", True),
        ("job.step >= 51 and replica.r1.state == contributing", False),
        ("job.step >= 51 or replica.r1.state == contributing", True),
        ("job.step>=50", True),
        ("replica.r1.state == 50", False),
    ],
)
def test_a_condition_is_met_or_not(text: str, met: bool) -> None:
    assert evaluate(parse(text), FACTS).met is met


def test_what_is_not_known_is_not_met_and_says_so() -> None:
    for text in ("replica.r9.state == contributing", "replica.r9.state != contributing"):
        finding = evaluate(parse(text), FACTS)
        assert not finding.met
        assert finding.sentence == "replica.r9.state is not known"


def test_a_finding_names_what_is_in_the_way_and_nothing_else() -> None:
    finding = evaluate(parse("job.step >= 51 and replica.r1.state == contributing"), FACTS)
    assert finding.sentence == "job.step is 50"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "a condition is expected"),
        (None, "a condition is expected"),
        (True, "a condition is expected"),
        ("job.step", "FACT OPERATOR VALUE"),
        ("job.step = 3", "is not understood"),
        ("job.step == ", "FACT OPERATOR VALUE"),
        ("job.step == 3 job.loss < 2", "`and` or `or`"),
        ("job.step == 3 and", "FACT OPERATOR VALUE"),
        ("a == 1 and b == 2 or c == 3", "write two conditions"),
        ("job.state < running", "needs a number"),
        ("job.step == $x", "is not understood"),
        ("__import__('os')", "is not understood"),
        ("x" * 600, "longer than"),
    ],
)
def test_what_is_no_condition_is_told_in_words(text: object, part: str) -> None:
    with pytest.raises(ExpressionError, match=part):
        parse(text)


@given(st.text(max_size=80))
def test_any_text_is_a_condition_or_refused(text: str) -> None:
    try:
        expression = parse(text)
    except ExpressionError:
        return
    assert parse(str(expression).replace("True", "true").replace("False", "false")) is not None or expression
    evaluate(expression, FACTS)
