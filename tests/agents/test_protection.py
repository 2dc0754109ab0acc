"""What is protected is not touched, whoever asks and whatever flags come with it; the refusal names rule and file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from agent_network import Namespace, add_rail, needs_root
from hypothesis import given
from hypothesis import strategies as st
from live_agent import live_agent
from live_helper import live_helper
from pyroute2 import IPRoute

from agents.api.faultspecs import SPECS
from agents.api.protect import Protection, pattern_problem
from agents.faults.catalog import CATALOG
from agents.faults.contract import Target
from agents.helper import wire
from agents.host.links import Nic
from agents.injection.guard import Facts, Limits, judge
from agents.injection.wish import Injection, wish_of
from agents.settings import AgentSettings, SettingsProblem, load

NAMES = ("node1", "node12", "head", "rail0", "rail1", "eth0", "r0", "r1", "r10")
PATTERNS = st.sampled_from(
    (*NAMES, "node?", "rail*", "r[01]", "*", "n*1", "node1/rail0", "*/rail1", "head/*", "[!r]*", "R0")
)
FILE = "/etc/ftctl/agent.yaml"


def matches(pattern: str, name: str) -> bool:
    """fnmatch(3), by hand and slowly."""
    if not pattern:
        return not name
    head, rest = pattern[0], pattern[1:]
    if head == "*":
        return any(matches(rest, name[i:]) for i in range(len(name) + 1))
    if head == "[":
        inside, _, rest = rest.partition("]")
        no, inside = inside.startswith("!"), inside.removeprefix("!")
        return bool(name) and ((name[0] in inside) is not no) and matches(rest, name[1:])
    return bool(name) and head in ("?", name[0]) and matches(rest, name[1:])


def nic(name: str, index: int) -> Nic:
    return Nic(name=name, index=index, mac=f"02:00:00:00:00:{index:02x}", mtu=1500, up=True, carrier=True)


@given(
    kind=st.sampled_from(sorted(SPECS)),
    rules=st.tuples(*[st.lists(PATTERNS, max_size=2)] * 3),
    theirs=st.tuples(*[st.lists(PATTERNS, max_size=1)] * 3),
    node=st.sampled_from(("node1", "head")),
    aimed=st.sampled_from(("rail0", "rail1")),
    replica=st.sampled_from(("r0", "r1")),
    here=st.sets(st.sampled_from(("r0", "r1", "r10"))),
    reckless=st.booleans(),
)
def test_a_fault_is_refused_exactly_when_a_rule_names_what_it_touches(
    kind: str,
    rules: tuple[list[str], ...],
    theirs: tuple[list[str], ...],
    node: str,
    aimed: str,
    replica: str,
    here: set[str],
    reckless: bool,
) -> None:
    fault, spec = CATALOG[kind], SPECS[kind]
    ours = Protection(*map(tuple, rules), source=FILE)
    book = Protection(*map(tuple, theirs), source="books/x.yaml")
    limits = Limits(node, ("rail0", "rail1"), "mgmt0", 4, 900.0, (ours,))
    asked = Injection(
        kind,
        "ann",
        30.0,
        nic=aimed if spec.target == "nic" else "",
        replica=replica if spec.target == "replica" else "",
        allow_last_rail=reckless,
        allow_last_replica=reckless,
        protection=(book,),
    )
    wish = wish_of(fault, asked, Target(node, asked.nic, asked.replica))
    facts = Facts((nic("rail0", 1), nic("rail1", 2)), (), frozenset(), tuple(sorted(here)))

    touched = {("nodes", node)}
    rails = {aimed} if spec.target == "nic" else {"rail0", "rail1"} if kind in ("node-down", "partition") else set()
    touched |= {("nics", rail) for rail in rails} | {("nics", f"{node}/{rail}") for rail in rails}
    hit = {replica} if spec.target == "replica" else set() if spec.target == "coordinator" else here
    touched |= {("replicas", one) for one in hit}
    named = {
        (which, pattern, source)
        for lists, source in ((rules, FILE), (theirs, "books/x.yaml"))
        for which, patterns in zip(("nodes", "nics", "replicas"), lists, strict=True)
        for pattern in patterns
        if any(kind_ == which and matches(pattern, name) for kind_, name in touched)
    }

    refusal = judge(wish, facts, limits)
    if not named:
        assert refusal is None or "protected" not in refusal.reason
        return
    assert refusal is not None
    assert refusal.code == "refused"
    found = re.search(r'\((\w+): "([^"]+)" in ([^)]+)\)$', refusal.reason)
    assert found, refusal.reason
    assert found.groups() in named
    assert found[3] in refusal.hint
    assert "\n" not in refusal.reason


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{nodes: ['a b']}", "protect.nodes: 'a b' is no pattern"),
        ("{nodes: [n/x]}", "a name without /"),
        ("{nics: [a/b/c]}", "NODE/DEVICE"),
        ("{replica: [r0]}", "protect.replica: there is no such setting"),
        ("{nics: eth0}", "protect.nics"),
        (f"{{nics: [{', '.join(['x'] * 257)}]}}", "protect.nics"),
        ("{nodes: ['']}", "is no pattern"),
    ],
)
def test_what_is_no_rule_is_said_with_its_key(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(f"node: node1\nstate_dir: s\ntokens_file: t\nprotect: {text}\n")
    with pytest.raises(SettingsProblem) as caught:
        load(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_setting_that_is_not_given_protects_nothing() -> None:
    settings = AgentSettings(node="n", state_dir=Path("s"), tokens_file=Path("t"))
    assert not settings.protect.of("f")
    assert pattern_problem("nics", "node*/eth?") == ""


def test_a_protected_node_answers_and_takes_no_fault() -> None:
    with live_agent(protect={"nodes": ["node[0-3]"]}) as agent:
        agent.start("--allow-faults")
        answer = agent.post("/v1/faults", {"kind": "noop", "dry_run": True}).json()
        assert answer["code"] == "refused"
        assert answer["reason"] == f'node1 is protected (nodes: "node[0-3]" in {agent.config})'
        assert agent.post("/v1/faults", {"kind": "noop", "reason": "try"}).status_code == 409
        (rules,) = agent.get("/v1/node").json()["protect"]
        assert (rules["nodes"], rules["source"]) == (["node[0-3]"], str(agent.config))
        last = agent.get("/v1/audit").json()["records"][-1]
        assert (last["result"], last["why"]) == ("refused", "try")
        assert "is protected" in last["detail"]


@pytest.mark.root
@needs_root
@pytest.mark.timeout(300)
def test_root_protects_a_rail_from_an_agent_that_would_have_it() -> None:
    namespace = Namespace()
    try:
        with namespace.entered(), IPRoute() as ipr:
            ipr.link("set", index=1, state="up")
            for number, name in enumerate(("rail0", "rail1")):
                add_rail(ipr, name, number)
            with live_helper(rails=["rail0", "rail1"], protect={"nics": ["rail0"], "replicas": ["r7"]}) as helper:
                helper.start()
                down = wire.Inject(kind="link-down", owner="ann", duration_s=5.0, nic="rail0", allow_last_rail=True)
                refused = helper.ask(down)
                assert isinstance(refused, wire.Refused), refused
                assert refused.reason == f'node1/rail0 is protected (nics: "rail0" in {helper.config})'
                whole = helper.ask(wire.Inject(kind="node-down", owner="ann", duration_s=5.0, allow_last_replica=True))
                assert isinstance(whole, wire.Refused), whole
                assert "node1/rail0 is protected" in whole.reason
                other = wire.Inject(kind="link-down", owner="ann", duration_s=5.0, nic="rail1", here=("r7",))
                felt = helper.ask(other)
                assert isinstance(felt, wire.Refused), felt
                assert "replica r7, which is protected" in felt.reason
                able = helper.ask(wire.Abilities())
                assert isinstance(able, wire.Able)
                assert able.protect[0].rules() == Protection((), ("rail0",), ("r7",), str(helper.config))
    finally:
        namespace.close()
