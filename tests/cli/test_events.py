"""`ftctl events`: one history from many witnesses."""

from __future__ import annotations

import asyncio
import time

from agents.api import models as m
from ftctl.client.cluster import Agents
from ftctl.client.events import Seen, follow, merge
from ftctl.config import Flags, load
from ftctl.context import World

from .conftest import Run
from .fake_agent import FakeCluster
from .fake_job import event


def test_events_of_all_sources_in_the_order_of_time_each_once(ftctl: Run, cluster: FakeCluster) -> None:
    assert cluster.job is not None
    lost = event(5, "coordinator", "replica.lost", "r1", "connection closed")
    cluster.job.events = [lost]
    cluster["node0"].events = [event(1, "node0", "agent.started", "node0"), lost]  # an agent heard of it too
    cluster["node1"].events = [event(3, "node1", "rail.down", "node1/rail0", "no carrier", injected=True)]
    result = ftctl("events")
    assert result.code == 0
    kinds = [line.split()[2] for line in result.out.splitlines()]
    assert kinds == ["agent.started", "rail.down", "replica.lost"]
    assert result.out.count("(injected)") == 1
    said = "down by fault f-1 (injected)"
    cluster["node1"].events = [event(3, "node1", "rail.down", "node1/rail0", said, injected=True)]
    assert ftctl("events").out.count("(injected)") == 1
    assert [e["object"] for e in ftctl("events", "-o", "json").json()["events"]] == ["node0", "node1/rail0", "r1"]
    assert "replica.lost" not in ftctl("events", "--node", "node1").out
    none = ftctl("events", "--since", "1m")
    assert (none.out, none.err) == ("", "no events since 1m ago\n")


def test_a_dead_agent_is_said_and_the_others_are_heard(ftctl: Run, cluster: FakeCluster) -> None:
    cluster["node0"].events = [event(1, "node0", "agent.started", "node0")]
    cluster["node2"].stop()
    result = ftctl("events")
    assert result.code == 6
    assert "agent.started" in result.out
    assert "agent of node2" in result.err
    assert ftctl("events", "--since", "yesterday").code == 2
    assert ftctl("events", "--node", "node7").code == 2
    assert ftctl("events", "-f", "-o", "yaml").code == 2


def test_texts_from_the_network_cannot_write_to_the_terminal(ftctl: Run, cluster: FakeCluster) -> None:
    cluster["node0"].events = [event(1, "node0", "x.y", "r1", "\x1b[2Jboo")]
    assert "\x1b" not in ftctl("events").out


def test_following_goes_on_over_an_agent_that_restarts(cluster: FakeCluster, world: World) -> None:
    """Numbers begin again after a restart; nothing is missed and nothing comes twice."""
    agent = cluster["node0"]
    agent.events = [event(7, "node0", "rail.down", "node0/rail0")]
    inventory = load(world, Flags(inventory=cluster.inventory)).inventory
    heard: list[str] = []

    async def until(condition: str) -> None:
        deadline = time.monotonic() + 90
        while condition not in heard and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert condition in heard

    async def until_said(text: str) -> None:
        deadline = time.monotonic() + 90
        while text not in world.stderr.getvalue() and time.monotonic() < deadline:  # type: ignore[attr-defined]
            await asyncio.sleep(0.02)

    async def story() -> None:
        async with Agents(world, inventory, 3.0) as agents:
            task = asyncio.create_task(
                follow(agents, ["node0"], lambda e: heard.append(e.kind), coordinator=False, since=0.0)
            )
            try:
                await until("rail.down")
                agent.events = [*agent.events, event(8, "node0", "rail.up", "node0/rail0")]
                await until("rail.up")
                await asyncio.to_thread(agent.stop)
                await until_said("trying again")  # the next life begins after somebody has missed the last one
                agent.boot, agent.events = "b2", [event(1, "node0", "agent.started", "node0")]
                agent.start()
                await until("agent.started")
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(story())
    assert heard == ["rail.down", "rail.up", "agent.started"]


def test_merge_and_seen_know_an_event_by_source_number_and_time() -> None:
    a, b = event(1, "node0", "x.a", "o"), event(2, "node0", "x.b", "o")
    assert merge([[b, a], [a]]) == [a, b]
    seen = Seen()
    assert [seen.first_time(e) for e in (a, b, a)] == [True, True, False]
    again = m.EventRecord(**{**a.model_dump(), "time": a.time + 60})  # the same number in a later life of the agent
    assert seen.first_time(again)
