"""Replicas whose ranks are on two nodes each: one dies on the node without the leader, is drained, evicted, rejoins.

Long, because four processes import torch on two cores: not in the default run.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from .conftest import eventually, needs_namespaces
from .test_whole_job import User, with_a_lab

pytestmark = [needs_namespaces, pytest.mark.soak, pytest.mark.timeout(900)]
WAIT = ("--timeout", "180s")


@pytest.fixture
def user() -> Iterator[User]:
    yield from with_a_lab("--replicas", "2", "--ranks", "2", "--nodes-per-replica", "2", "--step-ms", "300")


def ranks(user: User, replica: str) -> dict[int, tuple[str, int | None]]:
    """rank -> (node, process id)."""
    rows = json.loads(user.does("ranks", "-o", "json"))["ranks"]
    return {r["rank"]: (r["node"], r["process"] and r["process"]["pid"]) for r in rows if r["replica"] == replica}


def nodes(user: User, replica: str) -> list[str]:
    return next(r["nodes"] for r in user.sees()["replicas"] if r["name"] == replica)


def contributes(user: User, replica: str) -> None:
    user.does("wait", "replica", replica, "--for", "contributing", *WAIT)


def test_a_replica_over_two_nodes_lives_and_dies_whole(user: User) -> None:
    first = ranks(user, "r1")
    assert {rank: node for rank, (node, _) in first.items()} == {0: "node2", 1: "node3"}
    assert (nodes(user, "r0"), nodes(user, "r1")) == (["node0", "node1"], ["node2", "node3"])
    others = ranks(user, "r0")

    for victim in (1, 0):  # beside another leader than its own, then the leader
        before = ranks(user, "r1")
        epoch = user.sees()["job"]["epoch"]
        os.kill(before[victim][1] or 0, signal.SIGKILL)
        eventually(lambda epoch=epoch: user.sees()["job"]["epoch"] >= epoch + 2, "no epoch without r1 and with it", 240)  # type: ignore[misc]
        contributes(user, "r1")
        after = ranks(user, "r1")
        assert not {pid for _, pid in before.values()} & {pid for _, pid in after.values()}, "all its ranks are new"

    user.does("drain", "replica", "r1", "--reason", "test", "--wait", "--wait-timeout", "60s")
    eventually(lambda: [pid for _, pid in ranks(user, "r1").values()] == [None, None], "a rank of r1 did not end")
    user.does("rejoin", "replica", "r1", "--wait", "--wait-timeout", "180s")
    assert sorted(user.sees()["job"]["contributors"]) == ["r0", "r1"]

    before = ranks(user, "r1")
    os.kill(before[1][1] or 0, signal.SIGSTOP)  # it cannot end by itself, and no agent sees all of its replica
    eventually(lambda: user.sees()["job"]["contributors"] == ["r0"], "r1 was not put out")
    user.does("rejoin", "replica", "r1", "--wait", "--wait-timeout", "180s")
    assert not {pid for _, pid in before.values()} & {pid for _, pid in ranks(user, "r1").values()}
    assert ranks(user, "r0") == others, "the other replica noticed nothing"
