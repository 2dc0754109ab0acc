"""However faults come and go, no more is hit at once than the limits say; what overrides one is written down."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_agent import live_agent

from agents.api.blast import NO_LIMITS, RULES, Blast, Fleet, Hit, exceeded, felt
from agents.api.safety import BlastSaid, BlastSettings
from agents.faults.catalog import CATALOG
from agents.faults.contract import Target
from agents.injection.guard import Facts, JobFacts, Limits, OpenFault, judge
from agents.injection.wish import Injection, asks_the_job, wish_of


@dataclass
class Cluster:
    """Nodes with replicas on them, and what is in force. Counts by itself, knowing nothing of the rules."""

    hosts: dict[str, tuple[str, ...]]
    silent: frozenset[str]
    out: frozenset[str]
    open: dict[str, Hit] = field(default_factory=dict)

    @property
    def replicas(self) -> set[str]:
        return {replica for here in self.hosts.values() for replica in here}

    def fleet(self) -> Fleet:
        silent, out = tuple(self.silent), tuple(self.out)
        return Fleet(len(self.hosts), silent, len(self.replicas), out, tuple(self.open.values()))

    def hit_nodes(self) -> set[str]:
        return {hit.node for hit in self.open.values()} | self.silent

    def hit_replicas(self) -> set[str]:
        return {replica for hit in self.open.values() for replica in hit.replicas} | self.out


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    names = [f"n{i}" for i in range(draw(st.integers(1, 6)))]
    replica = st.sampled_from([f"r{i}" for i in range(6)])
    hosts = {name: tuple(sorted(draw(st.sets(replica, max_size=2)))) for name in names}
    every = sorted({one for here in hosts.values() for one in here})
    out = draw(st.sets(st.sampled_from(every), max_size=2)) if every else set()
    return Cluster(hosts, frozenset(draw(st.sets(st.sampled_from(names), max_size=1))), frozenset(out))


@given(clusters(), st.data())
def test_no_more_is_hit_than_the_limits_say(cluster: Cluster, data: st.DataObject) -> None:
    percents = st.sampled_from([1.0, 25.0, 34.0, 50.0, 67.0, 100.0])
    limits = Blast(
        data.draw(st.integers(1, 4)), data.draw(percents), data.draw(percents), data.draw(st.booleans()), "f"
    )
    for number in range(8):
        if cluster.open and data.draw(st.integers(0, 3)) == 0:
            cluster.open.pop(data.draw(st.sampled_from(sorted(cluster.open))))
        node = data.draw(st.sampled_from(sorted(cluster.hosts)))
        here = cluster.hosts[node]
        replica = data.draw(st.sampled_from(here)) if here and data.draw(st.booleans()) else ""
        hit = Hit(f"f-{number}", "k", node, felt("k", "replica" if replica else "nic", replica, here))
        nodes, replicas = cluster.hit_nodes(), cluster.hit_replicas()
        found = exceeded(hit, cluster.fleet(), limits)
        more_nodes, more_replicas = nodes | {node}, replicas | set(hit.replicas)
        broken = set()
        if len(cluster.open) + 1 > limits.faults:
            broken.add("faults")
        if (
            more_nodes != nodes
            and len(more_nodes) > 1
            and len(more_nodes) / len(cluster.hosts) * 100 > limits.nodes_percent
        ):
            broken.add("nodes_percent")
        share = len(more_replicas) / max(1, len(cluster.replicas)) * 100
        if more_replicas != replicas and len(more_replicas) > 1 and share > limits.replicas_percent:
            broken.add("replicas_percent")
        if limits.same_replica and replicas and more_replicas != replicas:
            broken.add("same_replica")
        assert (found.rule if found else None) == next((rule for rule in RULES if rule in broken), None), (hit, found)
        assert exceeded(hit, cluster.fleet(), limits, override=broken) is None
        assert exceeded(hit, cluster.fleet(), NO_LIMITS) is None
        for rule in broken:
            left = exceeded(hit, cluster.fleet(), limits, override=[rule])
            assert (left.rule if left else None) == next((r for r in RULES if r in broken - {rule}), None)
        if found is None:
            cluster.open[hit.id] = hit


LIMITS = Limits("node1", ("rail0", "rail1"), "mgmt0", 4, 900.0, blast=BlastSettings().of("agent.yaml"))
JOB = JobFacts(True, ("r0", "r1", "r2"), 1, wanted=4)


def refusal(kind: str, facts: Facts, **asked: object) -> str:
    wish = Injection(kind, "ann", 30.0, **{"allow_last_replica": True, **asked})  # type: ignore[arg-type]
    found = judge(wish_of(CATALOG[kind], wish, Target("node1")), facts, LIMITS)
    return "" if found is None else f"{found.reason}; {found.hint}"


def test_the_defaults_let_one_replica_be_hit_and_say_what_overrides_that() -> None:
    calm = Facts((), (), frozenset(), ("r1", "r2"), JOB)
    assert refusal("proc-hang", calm, replica="r1") == ""
    hung = replace(calm, open=(OpenFault("f-1", "proc-hang", "", 20.0, "r1"),))
    assert refusal("proc-slow", hung, replica="r2") == (
        "it would hit r2, and r1 already is hit (fault f-1, proc-hang): one replica at a time (blast_radius:"
        " same_replica in agent.yaml); --override same_replica --reason TEXT overrides this"
    )
    assert refusal("proc-slow", hung, replica="r2", override=("same_replica",)) == ""
    gone = replace(calm, job=replace(JOB, contributing=("r1", "r2"), out=("r0", "r3")))
    out = refusal("proc-hang", gone, replica="r1", override=("replicas_percent",))
    assert "it would hit r1, and r0, r3 already is hit (not contributing)" in out
    assert "it would hit r1 of 4 replicas; r0, r3 hit already" in refusal("proc-hang", gone, replica="r1")
    assert refusal("proc-slow", replace(gone, replicas=("r0",)), replica="r0") == "", "it is out already"
    elsewhere = Fleet(nodes=4, silent=("node1", "node9"), hits=(Hit("f-2", "link-loss", "node0", ("r0",)),))
    assert "node0, node9 of 4 nodes are hit already (no answer from node9)" in refusal("mem-hog", calm, fleet=elsewhere)
    assert refusal("noop", hung, fleet=elsewhere) == "", "a rehearsal hits nothing"
    assert refusal("coordinator-freeze", hung) == "", "it is no replica"


def test_a_playbook_can_only_narrow() -> None:
    wide = BlastSaid(source="book.yaml", faults=1000, nodes_percent=100, replicas_percent=100, same_replica=False)
    two = Facts((), (OpenFault("f-1", "proc-hang", "", 20.0, "r1"),), frozenset(), ("r1", "r2"), JOB)
    assert "agent.yaml" in refusal("proc-slow", two, replica="r2", blast=wide.limits())
    narrow = BlastSaid(source="book.yaml", faults=1).limits()
    assert (narrow.faults, narrow.same_replica, narrow.nodes_percent) == (1, False, 100.0)
    assert "faults in book.yaml" in refusal("mem-hog", two, blast=narrow, override=("same_replica",))
    assert not asks_the_job(CATALOG["link-loss"], Injection("link-loss", "ann", 1.0), replace(LIMITS, blast=NO_LIMITS))
    assert asks_the_job(CATALOG["link-loss"], Injection("link-loss", "ann", 1.0), LIMITS)


def test_an_agent_counts_what_it_is_told_and_writes_an_override_down() -> None:
    hits = [{"id": f"f-{i}", "kind": "link-loss", "node": f"node{i}"} for i in (2, 3)]
    wish = {"kind": "disk-full", "params": {"mb": 1, "leave_mb": 8}, "fleet": {"nodes": 4, "hits": hits}}
    with live_agent() as agent:
        agent.start("--allow-faults")
        assert agent.get("/v1/node").json()["blast"]["nodes_percent"] == 50
        refused = agent.post("/v1/faults", wish).json()
        assert refused["code"] == "refused"
        assert refused["reason"].startswith("node2, node3 of 4 nodes are hit already, and 50 % (2) may be at once")
        assert str(agent.config) in refused["reason"]
        bare = agent.post("/v1/faults", {**wish, "override": ["nodes_percent"]})
        assert (bare.status_code, bare.json()["reason"]) == (422, "a reason is required")
        assert agent.post("/v1/faults", {**wish, "override": ["gravity"], "reason": "x"}).status_code == 422
        made = agent.inject(**wish, override=["nodes_percent"], reason="two spines at once", duration_s=30.0)
        last = agent.get("/v1/audit").json()["records"][-1]
        assert (last["why"], last["result"], last["asks"]["override"]) == (
            "two spines at once",
            "ok",
            '["nodes_percent"]',
        )
        crowd = [{"id": f"g-{i}", "kind": "link-loss", "node": "node2"} for i in range(7)]
        many = {"kind": "mem-hog", "params": {"mb": 1, "leave_mb": 64}, "fleet": {"nodes": 2, "hits": crowd}}
        assert "8 faults are in force" in agent.post("/v1/faults", many).json()["reason"]
        assert agent.post(f"/v1/faults/{made['id']}/revert").json()["faults"][0]["state"] == "reverted"


@pytest.mark.parametrize("said", [{"faults": 0}, {"nodes_percent": 0}, {"replicas_percent": 101}, {"share": 1}])
def test_limits_that_are_none_are_refused(said: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(said))):
        BlastSettings(**said)
