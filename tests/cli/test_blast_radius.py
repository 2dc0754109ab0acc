"""ftctl tells each agent what is in force on the other nodes, and what it asks of them at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.api.safety import BlastView, FleetSaid
from ftctl.playbook.reading import load

from .conftest import Run
from .fake_agent import FakeCluster

LIMITS = BlastView(faults=8, nodes_percent=50, replicas_percent=50, same_replica=True, source="agent.yaml")
DOWN = ("inject", "link-down", "--rail", "1", "--node")


def told(cluster: FakeCluster, node: str) -> FleetSaid | None:
    return cluster[node].asked[-1].fleet


def test_an_agent_hears_of_the_others_and_an_older_one_of_nothing(ftctl: Run, cluster: FakeCluster) -> None:
    for name in ("node0", "node1"):
        cluster[name].blast = LIMITS
    assert ftctl(*DOWN, "node2").code == 0
    assert told(cluster, "node2") is None
    assert '"override"' not in cluster["node2"].asked[-1].model_dump_json(exclude_none=True)
    assert ftctl(*DOWN, "node[0-1]").code == 0
    first, second = told(cluster, "node0"), told(cluster, "node1")
    assert first is not None
    assert second is not None
    assert first.nodes == 3
    in_force = cluster["node2"].faults[0].id
    assert {(h.node, h.kind, tuple(h.replicas)) for h in first.hits} == {
        ("node2", "link-down", ("r2",)),
        ("node1", "link-down", ("r1",)),
    }
    assert {h.node for h in second.hits} == {"node0", "node2"}
    assert in_force in {h.id for h in first.hits}

    assert ftctl("revert", "--all").code == 0
    cluster["node2"].stop()
    assert ftctl("inject", "proc-hang", "--replica", "r1", "--node", "node1").code == 0
    last = told(cluster, "node1")
    assert last is not None
    assert (last.hits, last.silent, last.nodes) == ([], ["node2"], 3)


def test_an_override_needs_a_name_and_a_reason(ftctl: Run, cluster: FakeCluster) -> None:
    for wrong, right in (
        ("same_replicas", "same_replica"),
        ("same-replica", "same_replica"),
        ("nodes", "nodes_percent"),
    ):
        assert f"did you mean {right}?" in ftctl(*DOWN, "node0", "--override", wrong).err
    bare = ftctl(*DOWN, "node0", "--override", "nodes_percent")
    assert (bare.code, "a reason is required" in bare.err) == (2, True)
    lone = ftctl(*DOWN, "node0", "--allow-last-rail")
    assert (lone.code, "--allow-last-rail: a reason is required" in lone.err) == (2, True)
    whole = ftctl("inject", "proc-hang", "--replica", "r0", "--allow-last-replica")
    assert (whole.code, "a reason is required" in whole.err) == (2, True)
    assert cluster["node0"].asked == []
    assert (
        ftctl(*DOWN, "node0", "--override", "nodes_percent", "--override", "faults", "--reason", "two spines").code == 0
    )
    (asked,) = cluster["node0"].asked
    assert (asked.override, asked.reason) == (["faults", "nodes_percent"], "two spines")


BOOK = """\
version: 1
name: two
environments: [staging]
steady_state: [{expect: replicas.contributing == 3}]
blast_radius: {faults: 2, same_replica: true}
method:
  - parallel:
      - {inject: proc-hang, target: {replica: r0}}
      - {inject: proc-hang, target: {replica: r1}, override: [same_replica]}
  - {revert: all}
  - {inject: proc-hang, target: {replica: r2}}
"""


def test_a_run_tells_of_what_it_has_made_and_not_of_what_is_over(
    ftctl: Run, cluster: FakeCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTCTL_STATE_DIR", str(folder / "state"))
    cluster.inventory.write_text(cluster.inventory.read_text() + "environment: staging\n")
    for agent in cluster.agents.values():
        agent.blast = LIMITS
    path = folder / "two.yaml"
    path.write_text(BOOK)
    assert ftctl("chaos", "run", str(path)).code == 0
    (one,), (other,), (third,) = (cluster[name].asked for name in ("node0", "node1", "node2"))
    assert one.blast is not None
    assert (one.blast.faults, one.blast.nodes_percent, one.blast.source) == (2, None, str(path))
    assert other.override == ["same_replica"]
    assert one.fleet is not None
    assert other.fleet is not None
    assert third.fleet is not None
    told = [(hit.node, hit.replicas) for hit in (*one.fleet.hits, *other.fleet.hits)]
    assert told in ([("node0", ["r0"])], [("node1", ["r1"])]), "both began at once, and the second knows of the first"
    assert third.fleet.hits == [], "both are taken back"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "blast_radius: {nodes: 3}",
            "unknown key `nodes` (known: faults, nodes_percent, replicas_percent, same_replica)",
        ),
        ("blast_radius: {faults: 0}", "blast_radius.faults"),
        ("blast_radius: {nodes_percent: 0}", "blast_radius.nodes_percent"),
    ],
)
def test_limits_that_are_none_are_refused_with_their_line(bare: Run, folder: Path, text: str, words: str) -> None:
    path = folder / "two.yaml"
    path.write_text(BOOK.replace("blast_radius: {faults: 2, same_replica: true}", text))
    result = bare("chaos", "validate", str(path))
    assert result.code == 2
    assert f"{path}:5: " in result.err
    assert words in result.err
    path.write_text(BOOK)
    assert load(path).playbook.blast_radius.same_replica is True


TOGETHER = """\
version: 1
name: together
environments: [staging]
steady_state: [{expect: replicas.contributing == 3}]
method:
  - parallel:
      - {inject: %s, duration: 20s, %s}
      - {inject: %s, duration: 20s, %s}
"""
HANG, DOWN_0, DOWN_1 = "proc-hang", "target: {node: node1, nic: rail0}", "target: {node: node1, nic: rail1}"


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            (HANG, "target: {replica: r0}"),
            (HANG, "target: {replica: r1}, override: [replicas_percent]"),
            "it would hit r1, and r0 already is hit",
        ),
        (
            (HANG, "target: {replica: r0}"),
            (HANG, "target: {replica: r1}, override: [same_replica]"),
            "it would hit r1 of 3 replicas; r0 hit already, or not contributing",
        ),
        (
            (HANG, "target: {replica: r0}"),
            (HANG, "target: {replica: r1}, override: [same_replica, replicas_percent]"),
            "without r0, r1 only r2 would contribute",
        ),
        (
            (HANG, "target: {replica: r0}"),
            (HANG, "target: {replica: r1}, override: [same_replica, replicas_percent], allow_last_replica: true"),
            "",
        ),
        (
            ("link-loss", f"{DOWN_0}, with: {{percent: 1}}"),
            ("link-down", "target: {replica: r1, rail: 0}"),  # the file alone does not say that it is the same
            "link-loss on node1/rail0 would be",
        ),
        (("link-down", DOWN_0), ("link-down", DOWN_1), "rail1 would be the last healthy rail of node1"),
        (("link-down", DOWN_0), ("link-down", f"{DOWN_1}, allow_last_rail: true"), ""),
    ],
)
def test_a_plan_judges_a_parallel_group_together(
    ftctl: Run, cluster: FakeCluster, folder: Path, first: tuple[str, str], second: tuple[str, str], said: str
) -> None:
    """One by one, each of them would do."""
    cluster.inventory.write_text(cluster.inventory.read_text() + "environment: staging\n")
    assert cluster.job is not None
    cluster.job.min_replicas = 2
    for agent in cluster.agents.values():
        agent.blast = LIMITS.model_copy(update={"nodes_percent": 100.0})
    path = folder / "together.yaml"
    path.write_text(TOGETHER % (*first, *second))
    result = ftctl("chaos", "plan", str(path))
    assert result.code == (7 if said else 0), result.out
    assert (f"at the same time: {said}" if said else "undo") in result.out, result.out
    path.write_text((TOGETHER % (*first, *second)).replace("  - parallel:\n", "").replace("      - {", "  - {"))
    assert ftctl("chaos", "plan", str(path)).code == 0, "one after the other"
    assert not any(agent.faults for agent in cluster.agents.values())
