"""The whole product in one lab: real coordinator, agents and training processes, driven by `ftctl` as a user drives it.

One lab for all of it, because starting three training processes is what takes the time. The tests run in order and each
leaves the job as it found it: three replicas that contribute.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from ruamel.yaml import YAML

from agents.api.models import CoordinatorAction
from ftctl.app import main
from ftctl.context import World
from ftctl.lab import analysis, teardown
from ftctl.lab.journal import read_all
from ftctl.lab.layout import nodes
from ftctl.lab.lifecycle import Lab
from ftctl.lab.manifest import load_manifest
from ftctl.lab.paths import LabPaths
from ftctl.lab.ready import connect

from .conftest import eventually, machine, needs_namespaces, remains

pytestmark = [needs_namespaces, pytest.mark.timeout(300)]

FTCTL = Path(sys.executable).with_name("ftctl")
REPLICAS = ["r0", "r1", "r2"]


@dataclass
class User:
    """Somebody at a shell, with a lab."""

    state: Path

    def types(self, *args: str, within_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("FTCTL_") or name == "FTCTL_TIMEOUT"
        }
        env = {**kept, "FTCTL_STATE_DIR": str(self.state)}
        return subprocess.run(
            [str(FTCTL), *args], env=env, cwd=self.state, capture_output=True, text=True, timeout=within_s, check=False
        )

    def does(self, *args: str) -> str:
        """Type a command that must succeed."""
        done = self.types(*args)
        assert done.returncode == 0, f"ftctl {' '.join(args)}: exit {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def sees(self) -> dict[str, Any]:
        """`ftctl status -o json`, whatever its verdict; in this process, because it is looked at again and again."""
        environ = {"FTCTL_INVENTORY": str(self.paths.inventory), "FTCTL_TIMEOUT": "60s"}
        world = World(environ=environ, stdin=io.StringIO(), stdout=io.StringIO(), stderr=io.StringIO(), cwd=self.state)
        main(["status", "-o", "json"], world)
        assert isinstance(world.stdout, io.StringIO)
        status: dict[str, Any] = json.loads(world.stdout.getvalue())
        return status

    def waits_for_steps(self, count: int) -> None:
        start = self.sees()["job"]["step"] or 0
        eventually(lambda: (self.sees()["job"]["step"] or 0) >= start + count, "training does not go on")

    @property
    def paths(self) -> LabPaths:
        return LabPaths(self.state / "labs" / "lab")

    @property
    def lab(self) -> Lab:
        manifest = load_manifest(self.paths.manifest)
        return Lab(self.paths, manifest, nodes(manifest.options))


def with_a_lab(*options: str) -> Iterator[User]:
    """`lab up` with these options, and `lab down`, after which nothing is left on the machine."""
    before = machine()
    somebody = User(Path(tempfile.mkdtemp(prefix="ftctl-test-")))
    try:
        somebody.does("lab", "up", "--seed", "7", *options)
        uuid = somebody.lab.manifest.uuid
        yield somebody
        somebody.does("lab", "down")
        assert remains(uuid) == []
        assert not somebody.paths.root.exists()
        assert machine() <= before
    finally:
        if somebody.paths.root.exists():
            teardown.take_down(somebody.paths, grace_s=0)
        shutil.rmtree(somebody.state, ignore_errors=True)


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    yield from with_a_lab("--step-ms", "100", "--checkpoint-every", "5s", "--gpus", "1", "--policy", "observe")


def addresses(user: User, node: str) -> list[str]:
    code = (
        "from pyroute2 import IPRoute\n"
        "with IPRoute() as ip:\n"
        "    i = ip.link_lookup(ifname='rail0')[0]\n"
        "    print(*(a.get_attr('IFA_ADDRESS') for a in ip.get_addr(index=i)), ip.get_links(i)[0]['state'])"
    )
    return user.does("lab", "exec", node, "--", sys.executable, "-c", code).split()


def test_status_shows_the_lab(user: User) -> None:
    status = user.sees()
    assert status["schema"] == 1
    assert status["job"]["name"] == "lab"
    assert status["job"]["contributors"] == REPLICAS
    assert [node["name"] for node in status["nodes"]] == ["node0", "node1", "node2"]
    assert all(node["agent"]["pid"] > 0 and node["agent"]["age_s"] >= 0 for node in status["nodes"])
    assert all(len(node["rails"]) == 2 for node in status["nodes"])
    assert [replica["state"] for replica in status["replicas"]] == ["contributing"] * 3
    assert status["faults"] == []
    assert status["problems"] == []


def test_a_second_lab_of_the_same_name_is_refused_and_the_first_goes_on(user: User) -> None:
    again = user.types("lab", "up")
    assert again.returncode == 2
    assert "lab lab: is already up" in again.stderr
    assert "ftctl lab down" in again.stderr
    user.waits_for_steps(3)


def test_a_rail_goes_down_training_goes_on_and_a_killed_agent_leaves_nothing_broken(user: User) -> None:
    whole = addresses(user, "node1")
    assert whole == ["10.99.1.2", "fd99:0:0:1::2", "up"]
    user.does("inject", "link-down", "--node", "node1", "--nic", "rail0", "--duration", "60s", "--reason", "test")
    fault = user.sees()["faults"][0]
    assert (fault["kind"], fault["target"], fault["state"]) == ("link-down", "node1/rail0", "active")
    assert addresses(user, "node1") == ["10.99.1.2", "down"]
    os.kill(user.sees()["nodes"][1]["agent"]["pid"], signal.SIGKILL)
    # Nobody helps: the next agent does it when it starts, or the watchdog at the end of the time to live.
    eventually(lambda: addresses(user, "node1") == whole, "the rail did not come back whole", 150)
    eventually(lambda: user.sees()["nodes"][1]["agent"] is not None, "the agent was not started again")
    eventually(lambda: user.sees()["faults"] == [], "the fault is still listed")
    user.waits_for_steps(3)


def test_checkpoints_are_kept_beside_the_training(user: User) -> None:
    eventually(lambda: user.sees()["job"]["checkpoint"] is not None, "no checkpoint was told of")
    kept = user.sees()["job"]["checkpoint"]
    assert kept["step"] > 0
    assert kept["bytes"] > 100_000
    assert kept["age_s"] >= 0
    assert kept["failed"] is None
    assert re.search(r"  checkpoint step \d+, \d+\.\d MB, \S+ ago", user.does("status"))
    eventually(lambda: 'ftar_checkpoint_step{job="lab"} ' in metrics(user), "the agents do not say so")
    assert samples(user, "ftar_checkpoint_bytes")[0] > 100_000
    assert samples(user, "ftar_checkpoint_failures_total") == [0]
    assert [path for path in user.paths.checkpoints.iterdir() if path.name.startswith("step-")]
    kinds = [event["kind"] for event in json.loads(user.does("events", "-o", "json"))["events"]]
    assert "checkpoint.written" in kinds


def test_a_killed_replica_comes_back_by_itself(user: User) -> None:
    epoch = user.sees()["job"]["epoch"]
    ranks = json.loads(user.does("ranks", "-o", "json"))["ranks"]
    os.kill(next(rank["process"]["pid"] for rank in ranks if rank["replica"] == "r2"), signal.SIGKILL)
    eventually(lambda: user.sees()["job"]["epoch"] >= epoch + 2, "no epoch without it and one with it again")
    user.does("wait", "replica", "r2", "--for", "contributing", "--timeout", "240s")
    assert user.sees()["job"]["contributors"] == REPLICAS


def test_drain_and_rejoin(user: User) -> None:
    user.does("drain", "replica", "r1", "--reason", "test", "--wait")
    assert user.sees()["job"]["contributors"] == ["r0", "r2"]
    user.waits_for_steps(3)
    user.does("rejoin", "replica", "r1", "--wait")
    assert user.sees()["job"]["contributors"] == REPLICAS


def spent(user: User) -> dict[tuple[str, str | None], dict[str, Any]]:
    """Where the job's time went; all of it, and every microsecond once."""
    account = user.sees()["job"]["accounting"]
    assert sum(entry["us"] for entry in account["spent"]) == account["total_us"]
    assert sum(entry["share"] for entry in account["spent"]) == pytest.approx(1.0)
    return {(entry["category"], entry["cause"]): entry for entry in account["spent"]}


def metrics(user: User) -> str:
    """Of one agent, over its socket."""
    inventory = YAML(typ="safe").load(user.paths.inventory.read_text())
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=inventory["nodes"][0]["url"].removeprefix("unix://")),
        headers={"authorization": f"Bearer {Path(inventory['token_file']).read_text().strip()}"},
        timeout=60,
    ) as client:
        return client.get("http://agent/metrics").text


def samples(source: User | str, name: str, label: str = "") -> list[float]:
    """Values of a metric."""
    text = source if isinstance(source, str) else metrics(source)
    found = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    return [float(value) for labels, value in found if label in labels]


def test_where_the_time_went_is_accounted_for_by_cause(user: User) -> None:
    went = spent(user)
    assert went["productive", None]["us"] > went["degraded", "drained"]["us"] > 0
    assert went["degraded", "killed"]["us"] > 0
    assert went["starting", None]["us"] > 0
    counts = {cause: went["stalled", cause]["count"] for cause in ("killed", "drained", "rejoin")}
    assert all(counts[cause] >= least for cause, least in {"killed": 1, "drained": 1, "rejoin": 2}.items()), counts
    page = user.does("status")
    assert re.search(r"^effective \d+\.\d % of \d+\S*  lost: .*\d\.\d % ", page, re.M)
    # Dashboards are told what was saved last, at most five seconds ago.
    killed = 'ftar_training_seconds_total{category="degraded",cause="killed",job="lab"} '
    eventually(lambda: killed in metrics(user), "the agents do not say where the time went")
    text = metrics(user)
    seconds = samples(text, "ftar_training_seconds_total")
    (productive,) = samples(text, "ftar_training_seconds_total", 'category="productive"')
    (ratio,) = samples(text, "ftar_effective_training_ratio")
    assert 0 < ratio < 1
    assert productive / sum(seconds) == pytest.approx(ratio, abs=1e-5), "productive and all losses are all of the time"


def test_a_killed_coordinator_is_started_again_and_the_job_goes_on(user: User) -> None:
    before, went = user.sees()["job"], spent(user)
    os.kill(before["coordinator"]["pid"], signal.SIGKILL)
    eventually(lambda: (user.sees()["job"]["term"] or 0) > before["term"], "no coordinator of a higher term")
    eventually(lambda: user.sees()["job"]["contributors"] == REPLICAS, "not all replicas are back")
    user.waits_for_steps(3)
    after = spent(user)
    assert after["stalled", "coordinator"]["us"] > 0
    assert after["starting", None]["us"] >= went["starting", None]["us"], "the account is kept"
    if killed := went.get(("degraded", "killed")):  # if the test before killed one in this lab
        assert all(after["degraded", "killed"][column] >= killed[column] for column in ("us", "count")), (
            "the account is kept"
        )
    assert after["productive", None]["count"] > went["productive", None]["count"]


def chain(user: User, node: str, since: float) -> list[dict[str, Any]]:
    """What the agent of a node told of an incident since then, from its file."""
    lines = (user.paths.node(node) / "state" / "events.jsonl").read_text().splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [event for event in found if event["time"] >= since and event["incident"]]


def test_a_lost_gpu_takes_its_replica_out_until_it_is_well_again(user: User) -> None:
    """From the fault to the return under one incident id; Xid 31 restarts, 63 is recorded."""
    user.does("policy", "set-mode", "act", "--reason", "test", "--node", "node1")
    since = time.time()
    user.does("inject", "gpu-xid", "--xid", "79", "--node", "node1", "--duration", "60s")
    eventually(lambda: user.sees()["job"]["contributors"] == ["r0", "r2"], "r1 is not evicted")
    user.waits_for_steps(3)
    shown = json.loads(user.types("policy", "show", "--node", "node1", "-o", "json").stdout)["nodes"][0]
    assert [(held["replica"], held["cordoned"]) for held in shown["held"]] == [("r1", True)]
    user.does("revert", "--all")
    eventually(lambda: user.sees()["job"]["contributors"] == REPLICAS, "r1 does not come back")
    events = chain(user, "node1", since)
    assert len({event["incident"] for event in events}) == 1
    assert [event for event in events if not (event["injected"] and event["reason"]) or event["node"] != "node1"] == []
    did = [event["action"] for event in events if event["kind"] == "policy.acted"]
    assert did == ["evict", "cordon", "uncordon", "rejoin"]

    def links() -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in user.does("events", "--incident", events[0]["incident"], "-o", "json").splitlines()
        ]

    eventually(lambda: any(link["kind"] == "replica.joined" for link in links()), "the chain has no end")
    told = links()
    names = ["time", "incident", "node", "kind", "object", "verdict", "action", "reason", "injected"]
    assert all([name for name in link if name != "schema"] == names for link in told)
    kinds = [link["kind"] for link in told]
    for between in ("epoch.new", "replica.stopping"):  # the coordinator and the agent do these beside each other
        steps = ("gpu.unhealthy", "policy.decided", "replica.evicted", between, "gpu.healthy",
                 "replica.allowed", "replica.started", "replica.joined")  # fmt: skip
        firsts = [kinds.index(kind) for kind in steps]
        assert firsts == sorted(firsts), kinds
    assert all(link["injected"] for link in told)
    stopping = next(link for link in told if link["kind"] == "replica.stopping")
    assert "evicted by policy of node1: rule suggested-evict-node" in stopping["reason"]
    since = time.time()
    user.does("inject", "gpu-xid", "--xid", "63", "--node", "node1", "--duration", "1s")
    user.does("inject", "gpu-xid", "--xid", "31", "--node", "node2", "--duration", "1s")
    eventually(lambda: any(event["kind"] == "policy.decided" for event in chain(user, "node1", since)), "no decision")
    assert [event["action"] for event in chain(user, "node1", since) if event["kind"] == "policy.decided"] == ["watch"]
    eventually(lambda: any(event["kind"] == "policy.decided" for event in chain(user, "node2", since)), "no decision")
    told = chain(user, "node2", since)
    assert [event["action"] for event in told if event["kind"].startswith("policy.")] == ["restart"], "it only observes"
    user.does("policy", "set-mode", "observe", "--reason", "test over")
    assert user.sees()["job"]["contributors"] == REPLICAS


def test_a_finished_job_ends_everywhere_with_the_same_bits(user: User) -> None:
    """Last: the job is over after it."""

    async def finish() -> None:
        async with connect(World(), user.lab) as agents:
            await agents.act(lambda client: client.finish(CoordinatorAction(reason="test")))

    asyncio.run(finish())
    eventually(
        lambda: all(not read_all(user.paths.journal)[name].last_life_runs() for name in REPLICAS),
        "a replica did not end",
    )
    journals = read_all(user.paths.journal)
    ends = analysis.ends(journals, REPLICAS)
    assert analysis.identical(ends), ends
    assert all(end is not None and end.exit_code == 0 for end in ends.values())
    first, last = analysis.losses(journals)
    assert first is not None
    assert last is not None
    assert last < first
    # A replica that was neither killed nor drained saw every step once.
    numbers = [line.step for line in analysis.step_lines(journals, "r0")]
    assert numbers == list(range(1, len(numbers) + 1))
