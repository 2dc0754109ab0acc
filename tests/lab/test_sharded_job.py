"""Replicas of two processes each that share a model (FSDP2), in a lab: drained, evicted, and a rank of one killed.

Long, because seven processes import torch on two cores: not in the default run.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from ftctl.lab.journal import read_all

from .conftest import eventually, needs_namespaces
from .test_whole_job import REPLICAS, User, with_a_lab

pytestmark = [needs_namespaces, pytest.mark.soak, pytest.mark.timeout(1500)]
SHARDED = ("--ranks", "2", "--step-ms", "200")


@pytest.fixture
def user() -> Iterator[User]:
    yield from with_a_lab(*SHARDED, "--steps", "400")


def pids(user: User, replica: str) -> dict[int, int]:
    ranks = json.loads(user.does("ranks", "-o", "json"))["ranks"]
    return {r["rank"]: r["process"]["pid"] for r in ranks if r["replica"] == replica and r["process"] is not None}


def test_replicas_of_several_ranks_live_and_die_whole_and_end_with_the_same_shards(user: User) -> None:
    others = pids(user, "r0"), pids(user, "r2")
    first = pids(user, "r1")
    assert sorted(first) == [0, 1]
    epoch = user.sees()["job"]["epoch"]
    os.kill(first[1], signal.SIGKILL)
    eventually(lambda: user.sees()["job"]["epoch"] >= epoch + 2, "no epoch without r1 and one with it again", 90)
    user.does("wait", "replica", "r1", "--for", "contributing", "--timeout", "90s")
    assert not set(pids(user, "r1").values()) & set(first.values()), "both its ranks are new processes"
    assert (pids(user, "r0"), pids(user, "r2")) == others, "the other replicas noticed nothing"
    user.does("drain", "replica", "r2", "--reason", "test", "--wait")
    assert user.sees()["job"]["contributors"] == ["r0", "r1"]
    user.does("rejoin", "replica", "r2", "--wait")
    user.does("evict", "replica", "r1", "--reason", "test", "--yes")
    user.does("wait", "replica", "r1", "--for", "contributing", "--timeout", "90s")
    assert user.sees()["job"]["contributors"] == REPLICAS
    eventually(lambda: user.sees()["job"]["state"] == "finished", "the job does not end", 300)
    journals, of_rank1 = read_all(user.paths.journal), read_all(user.paths.journal / "ranks")
    shards = set()
    for ends in ([journals[name] for name in REPLICAS], [of_rank1[f"{name}.1"] for name in REPLICAS]):
        eventually(lambda ends=ends: all(not j.last_life_runs() for j in ends), "a rank did not end")  # type: ignore[misc]
        last = [journal.of_kind("end")[-1] for journal in ends]
        assert {end.exit_code for end in last} == {0}
        assert len({(end.step, end.params_digest, end.optimizer_digest) for end in last}) == 1
        shards.add(last[0].params_digest)
    assert len(shards) == 2, "each rank holds another shard"
    numbers = [line.step for line in journals["r0"].of_kind("step")]
    assert numbers == list(range(1, 401)), "r0 saw every step once"


@pytest.fixture
def spared() -> Iterator[User]:
    yield from with_a_lab(*SHARDED, "--steps", "900", "--spares", "1")


def roles(user: User) -> tuple[str, list[str]]:
    """The spare and the contributors by slot, once all are there."""
    found: dict[str, list[str]] = {}

    def whole() -> bool:
        found.update({kind: user.sees()["job"][kind] for kind in ("contributors", "spares")})
        return (len(found["contributors"]), len(found["spares"])) == (3, 1)

    eventually(whole, "three contributors and a spare", 120)
    return found["spares"][0], found["contributors"]


def test_a_hot_spare_of_two_ranks_takes_the_place_of_whatever_leaves(spared: User) -> None:
    """Each time it is asked anew who has which part: on a busy machine a replica may be lost without our doing."""
    user = spared
    spare, (first, second, third) = roles(user)
    user.does("wait", "replica", spare, "--for", "spare", "--timeout", "30s")
    assert "hot spare" in user.does("why", "replica", spare)
    user.does("drain", "replica", second, "--reason", "test", "--wait")
    eventually(lambda: set(user.sees()["job"]["contributors"]) == {first, spare, third}, "the spare does not come")
    assert "promoted into slot" in user.does("why", "replica", spare)
    user.does("rejoin", "replica", second, "--wait")
    _, (_, _, third) = roles(user)
    user.does("evict", "replica", third, "--reason", "test", "--yes")
    spare, (first, _, _) = roles(user)
    os.kill(pids(user, first)[1], signal.SIGKILL)
    user.does("wait", "replica", spare, "--for", "contributing", "--timeout", "60s")
    _, last = roles(user)
    eventually(lambda: user.sees()["job"]["state"] == "finished", "the job does not end", 900)
    journals, of_rank1 = read_all(user.paths.journal), read_all(user.paths.journal / "ranks")
    for ends in ([journals[name] for name in last], [of_rank1[f"{name}.1"] for name in last]):
        eventually(lambda ends=ends: all(not j.last_life_runs() for j in ends), "a rank did not end")  # type: ignore[misc]
        finished = [end for journal in ends if (end := journal.of_kind("end")[-1]).exit_code == 0]
        assert len({(end.step, end.params_digest, end.optimizer_digest) for end in finished}) == 1
    assert any(len(line.contributors) == 3 for line in journals[last[0]].of_kind("step")[-50:])
