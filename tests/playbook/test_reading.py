"""Playbooks as files: what is in them, and the line of every mistake."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from ftctl.errors import UsageProblem
from ftctl.playbook import mixes
from ftctl.playbook import schema as s
from ftctl.playbook.__main__ import PAGE, page
from ftctl.playbook.conduct import by_lab
from ftctl.playbook.moments import Moment
from ftctl.playbook.reading import find, load, variables_of
from ftctl.playbook.template import text_for

from .books import MINIMAL, book, with_method, written

ROOT = Path(__file__).parents[2]


def test_what_init_writes_is_valid(tmp_path: Path) -> None:
    playbook = book(tmp_path, text_for("My first one!")).playbook
    assert playbook.name == "my-first-one"
    inject = playbook.method[1]
    assert isinstance(inject, s.Inject)
    assert (inject.target.replica, inject.target.rail, inject.duration) == ("r1", "active", 20.0)
    assert isinstance(playbook.cleanup[1], s.Ensure)
    assert str(playbook.cleanup[1].ensure) == "replica.r1.state == contributing"


@pytest.mark.parametrize("path", sorted((ROOT / "playbooks").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_playbook_that_ships_is_valid_and_tells_what_it_shows(path: Path) -> None:
    playbook = load(path).playbook
    assert playbook.name == path.stem
    assert playbook.description
    assert playbook.tags


def test_the_reference_is_made_from_the_schema() -> None:
    assert PAGE.read_text() == page(), "run: python -m ftctl.playbook"
    assert all(f"| `{verb}` |" in page() for verb in s.VERBS)


def test_playbooks_of_one_lab_run_beside_each_other() -> None:
    books = [load(path) for path in find([ROOT / "playbooks"])]
    grouped = by_lab(books)
    assert sorted(b.name for b in grouped) == sorted(b.name for b in books)
    labs = [book.playbook.lab for book in grouped]
    changes = sum(one != other for one, other in pairwise(labs))
    assert changes + 1 == len({lab.model_dump_json() for lab in labs})
    assert changes < sum(one.playbook.lab != other.playbook.lab for one, other in pairwise(books))
    first = [[b.name for b in some if b.playbook.lab == labs[0]] for some in (grouped, books)]
    assert first[0] == first[1], "in their order"


def test_variables_keep_their_type_where_they_are_the_whole_text(tmp_path: Path) -> None:
    text = with_method("{steps: $count}", "{wait: replica.$who.step >= $count}", vars="{count: 7, who: r2}")
    playbook = book(tmp_path, text, count="9").playbook
    assert isinstance(playbook.method[0], s.Steps)
    assert playbook.method[0].steps == 9
    assert isinstance(playbook.method[1], s.Wait)
    assert str(playbook.method[1].wait) == "replica.r2.step >= 9"


def test_the_published_mix_is_one_of_faults_that_exist_in_its_shares(tmp_path: Path) -> None:
    action = book(tmp_path, with_method("{storm: {mtbf: 8s, lasts: 1m, mix: published}}")).playbook.method[0]
    assert isinstance(action, s.Storm)
    shares: dict[str, float] = {}
    for fault in action.storm.mix:
        shares[fault.inject] = shares.get(fault.inject, 0.0) + fault.weight
    assert {kind: round(share, 1) for kind, share in shares.items()} == {
        "proc-kill": 55.4,  # memory, PCIe, GPU, software
        "node-down": 17.6,  # maintenance, kernel, reboot
        "proc-hang": 9.0,
        "proc-slow": 7.2,
        "state-corrupt": 5.5,
        "link-down": 5.3,
    }
    assert round(sum(shares.values()), 6) == 100
    assert "arXiv" in mixes.source("published")


@pytest.mark.parametrize(
    ("text", "unix", "after"),
    [
        ("2026-12-01T14:30:00Z", 1796135400.0, None),
        ("'2026-12-01T14:30:00Z'", 1796135400.0, None),
        ("2026-12-01T16:30:00+02:00", 1796135400.0, None),
        ("'2026-12-01 12:00:00-02:30'", 1796135400.0, None),
        ("+1m30s", None, 90.0),
    ],
)
def test_a_moment_is_one_of_the_calendar_or_of_the_method(
    tmp_path: Path, text: str, unix: float | None, after: float | None
) -> None:
    action = book(tmp_path, with_method(f"{{revert: all, at: {{time: {text}}}}}")).playbook.method[0]
    assert isinstance(action, s.Revert)
    assert action.at is not None
    assert action.at.time == Moment(unix, after)
    assert action.at.time.left(began=1796135300.0, now=1796135350.0) == (50.0 if unix else 40.0)
    assert str(action.at.time) == ("2026-12-01T14:30:00Z" if unix else "+1m30s")


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        (MINIMAL + "colour: red\n", 7, "unknown key `colour` (known: version, name"),
        (with_method("{steps: 1, colour: red}"), 6, "unknown key `colour`"),
        (with_method("{steps: 1}", "{inject: link-down, target: {nod: node1}}"), 7, "unknown key `nod`"),
        (with_method("{parallel: [{steps: 1}, {sleep: 3}]}"), 6, "is no duration"),
        (with_method("{sleep: -1s}"), 6, "is not a duration"),
        (with_method("{dance: 1}"), 6, "an action is expected, one of inject"),
        (with_method("{steps: 0}"), 6, "greater than or equal to 1"),
        (with_method("{wait: replicas.contributing = 3}"), 6, "is not understood"),
        (with_method("{wait: replicas.dancing == 3}"), 6, "there is no dancing of replicas"),
        (with_method("{wait: weather == good}"), 6, "there is no fact weather"),
        (with_method("{inject: link-down, target: {nic: rail0}}"), 6, "whose link?"),
        (with_method("{inject: link-down, target: {node: n, nic: a, rail: 1}}"), 6, "give one"),
        (with_method("{inject: noop, at: {step: 3, after: 1s}}"), 6, "exactly one of"),
        (with_method("{inject: noop, at: {time: 2026-12-01 14:30:00}}"), 6, "in which time zone?"),
        (with_method("{inject: noop, at: {time: '2026-12-01T14:30:00'}}"), 6, "in which time zone?"),
        (with_method("{inject: noop, at: {time: 2026-12-01}}"), 6, "is no time"),
        (with_method("{inject: noop, at: {time: 90s}}"), 6, "is no time"),
        (with_method("{inject: noop, at: {time: +9}}"), 6, "is no time"),
        (with_method("{storm: {mtbf: 1s, lasts: 9s, mix: []}}"), 6, "at least 1"),
        (with_method("{inject: link-dwon, target: {node: n, rail: 0}}"), 6, "did you mean link-down?"),
        (with_method("{inject: link-down, target: {node: n}}"), 6, "is aimed at a link: give nic or rail"),
        (with_method("{inject: link-loss, target: {node: n, rail: 0}}"), 6, "needs `with: {percent: ...}`"),
        (
            with_method("{inject: link-loss, target: {node: n, rail: 0}, with: {percent: x}}"),
            6,
            "must be float, not str",
        ),
        (with_method("{inject: link-loss, target: {node: n, rail: 0}, with: {percent: 200}}"), 6, "must be at most 99"),
        (with_method("{inject: link-loss, target: {node: n, rail: 0}, with: {parts: 2}}"), 6, "has no parameter parts"),
        (with_method("{inject: proc-kill, target: {replica: r1}, with: {signal: HUP}}"), 6, "must be one of KILL"),
        (with_method("{inject: proc-kill, target: {node: n}}"), 6, "is aimed at a replica"),
        (
            with_method("{storm: {mtbf: 1s, lasts: 9s, mix: [{inject: nop, target: {node: n}}]}}"),
            6,
            "did you mean noop?",
        ),
        (
            with_method("{storm: {mtbf: 1s, lasts: 9s, mix: publishd}}"),
            6,
            "there is no mix 'publishd' (there are: published)",
        ),
        (with_method("{sleep: 1s}", vars="{a: .inf}"), 5, "a finite number is expected"),
        (
            with_method("{inject: link-loss, target: {node: n, rail: 0}, with: {percent: .nan}}"),
            6,
            "a finite number is expected",
        ),
        (
            with_method("{inject: link-loss, target: {node: n, rail: 0}, with: {percent: [1]}}"),
            6,
            "a number or a text is expected",
        ),
        (
            with_method(
                "{inject: link-down, target: {node: n, rail: 0}, duration: 20s}",
                "{expect: rails.down == 1}",
                "{sleep: 5s}",
                "{inject: link-loss, target: {node: n, rail: 0}, with: {percent: 2}}",
            ),
            9,
            "link-loss would be refused: link-down is in force on the same link (rail 0 of n) by then",
        ),
        (
            with_method(
                "{parallel: [{inject: link-down, target: {node: n, nic: a}}, "
                "{inject: link-blackhole, target: {node: n, nic: a}}]}"
            ),
            6,
            "link-blackhole would be refused: link-down",
        ),
        (with_method("{steps: $n}"), 6, "`$n`: there is no such variable (there are: none)"),
        (with_method("{command: [echo, $1]}"), 6, "a variable's name is expected"),
        (with_method("{inject: noop, target: {node: $a}}", vars="{a: $b, b: $a}"), 5, "variable a: `$b` has another"),
        (with_method("{inject: noop, target: {node: $a}}", vars="{a: 'x${a}'}"), 5, "none is made of others"),
        (with_method("{inject: noop, target: {node: ''}}"), 6, "at least 1 character"),
        (with_method("{inject: noop, target: {replica: []}}"), 6, "valid string"),
        (with_method("{steps: 1}", vars="[1]"), 5, "`vars` is a mapping"),
        (with_method("{steps: 1}", vars="{a: [1]}"), 5, "a number or a text is expected"),
        (with_method("{steps: 1}", objectives="{stall_ms: {p95: 3}}"), 1, "p95 needs repeat: 20 or more (it is 1)"),
        (with_method("{steps: 1}", objectives="{stall_ms: {}}"), 5, "a limit is expected"),
        (with_method("{steps: 1}", objectives="{joy: {max: 1}}"), 5, "unknown key `joy`"),
        (with_method("{steps: 1}", environments="[]"), 5, "at least 1"),
        ("version: 2\nname: a\nsteady_state: []\nmethod: []\n", 1, "`version`"),
        ("version: 1\nname: a\nmethod: [{steps: 1}]\n", 1, "`steady_state` is missing"),
        ("version: 1\nname: 'A b'\nsteady_state: [{expect: job.step > 1}]\nmethod: [{steps: 1}]\n", 2, "`name`"),
        ("a: [1\n", 2, "not YAML"),
        ("- 1\n", 1, "a mapping is expected, as a playbook has it"),
        ("a: &x [1]\nb: [*x, *x]\n", 2, "aliases (*x) are not understood"),
        ("a: " + "[" * 40 + "]" * 40 + "\n", 1, "nested deeper than"),
        ("a: 1\na: 2\n", 2, "not YAML"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, line: int, part: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageProblem) as caught:
        load(path)
    assert part in str(caught.value)
    assert str(caught.value).startswith(f"{path}:{line}: "), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_playbook(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="larger than"):
        load(written(tmp_path, "#" * 300_000))
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageProblem, match="not UTF-8"):
        load(tmp_path / "b.yaml")
    with pytest.raises(UsageProblem, match="is not there"):
        find([tmp_path / "none.yaml"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageProblem, match="no playbook in it"):
        find([tmp_path / "empty"])


def test_variables_of_the_command_line(tmp_path: Path) -> None:
    assert variables_of(["a=1", "b=x=y"]) == {"a": "1", "b": "x=y"}
    with pytest.raises(UsageProblem, match="NAME=VALUE"):
        variables_of(["a"])
    with pytest.raises(UsageProblem, match="has no such variable"):
        book(tmp_path, MINIMAL, victim="r1")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*s.VERBS, "target", "at", "with", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from([*s.Playbook.model_fields, "x"]), values, max_size=6))
def test_whatever_stands_in_a_file_is_a_playbook_or_a_complaint(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, object]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(content, file)
    with suppress(UsageProblem):
        load(path)


@pytest.mark.parametrize(
    "between",
    ["{revert: all}", "{sleep: 19s}", "{steps: 5}", "{wait: rails.down == 0}", "{expect: rails.down == 0, within: 9s}"],
)
def test_a_link_may_have_faults_one_after_the_other(tmp_path: Path, between: str) -> None:
    first = "{inject: link-down, target: {node: n, rail: 0}, duration: 20s}"
    second = "{inject: link-loss, target: {node: n, rail: 0}, with: {percent: 2}}"
    path = tmp_path / "book.yaml"
    path.write_text(with_method(first, between, second))
    assert load(path).notes == ()
    path.write_text(with_method(first, first.replace("rail: 0", "rail: 1"), first.replace("node: n", "node: m")))
    assert load(path).notes == ()
    path.write_text(with_method(first.replace("rail: 0", "rail: active"), first.replace("rail: 0", "rail: active")))
    assert load(path).notes == ()


def test_what_is_looked_at_once_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "book.yaml"
    path.write_text(with_method("{steps: 5}", "{expect: replicas.contributing == 3}", "{expect: faults.active == 0}"))
    assert load(path).notes == (
        f"{path}:7: `expect: replicas.contributing == 3` is looked at once; `within: 5s` waits for what a busy machine "
        "shows late",
    )
