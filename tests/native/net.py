"""Two or more nodes from network namespaces: a veth a rail into that rail's bridge, as behind a switch."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from . import PATIENCE

NAMESPACES = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip: apt-get install iproute2"),
]
WORKER = Path(__file__).with_name("ring_worker.py")


def ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise AssertionError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def remove_leftovers() -> None:
    """Namespaces of a test run that was killed: their names have its process id."""
    for path in Path("/run/netns").glob("ftart*-*"):
        owner = path.name.removeprefix("ftart").split("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            ip("netns", "del", path.name, check=False)


class Net:
    """Namespaces PREFIX-sw (bridges) and PREFIX-n0, -n1, ...; rail k of node i has the address 10.77.k.(i+1)."""

    def __init__(self, nodes: int, rails: int = 2) -> None:
        self.prefix = f"ftart{os.getpid()}"
        self.nodes, self.rails = nodes, rails
        self.names = [f"{self.prefix}-sw", *(self.ns(i) for i in range(nodes))]

    def ns(self, node: int) -> str:
        return f"{self.prefix}-n{node}"

    def __enter__(self) -> Net:
        remove_leftovers()
        try:
            for name in self.names:
                ip("netns", "add", name)
            switch = self.names[0]
            for k in range(self.rails):
                ip("-n", switch, "link", "add", f"br{k}", "type", "bridge", "forward_delay", "0")
                ip("-n", switch, "link", "set", f"br{k}", "up")
                for i in range(self.nodes):
                    ns = self.ns(i)
                    ip(
                        "-n",
                        ns,
                        "link",
                        "add",
                        f"rail{k}",
                        "type",
                        "veth",
                        "peer",
                        "name",
                        f"n{i}r{k}",
                        "netns",
                        switch,
                    )
                    ip("-n", switch, "link", "set", f"n{i}r{k}", "master", f"br{k}", "up")
                    ip("-n", ns, "addr", "add", f"10.77.{k}.{i + 1}/24", "dev", f"rail{k}")
                    ip("-n", ns, "link", "set", f"rail{k}", "up")
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.remove()

    def remove(self) -> None:
        for name in self.names:
            ip("netns", "del", name, check=False)

    def rail_list(self, node: int) -> list[tuple[str, str, str]]:
        return [(f"rail{k}", f"rail{k}", f"10.77.{k}.{node + 1}") for k in range(self.rails)]

    def link(self, node: int, rail: int, state: str) -> None:
        ip("-n", self.ns(node), "link", "set", f"rail{rail}", state)

    def renumber(self, node: int, rail: int, host: int) -> str:
        """The rail gets the address 10.77.rail.host instead of the one it has."""
        ns, device = self.ns(node), f"rail{rail}"
        ip("-n", ns, "addr", "flush", "dev", device)
        ip("-n", ns, "addr", "add", f"10.77.{rail}.{host}/24", "dev", device)
        return f"10.77.{rail}.{host}"

    def lose_large(self, node: int, rail: int) -> None:
        """The switch drops what is longer than 1000 bytes and comes from this node, and tells nobody."""
        rules = (
            f"add table netdev n{node}r{rail}; add chain netdev n{node}r{rail} large {{ type filter hook ingress "
            f'device "n{node}r{rail}" priority 0; }}; add rule netdev n{node}r{rail} large meta length > 1000 drop'
        )
        ip("netns", "exec", self.names[0], "nft", rules)

    def lose_large_no_more(self, node: int, rail: int) -> None:
        ip("netns", "exec", self.names[0], "nft", f"delete table netdev n{node}r{rail}")

    def lose_silently(self, node: int, rail: int, to: int) -> None:
        """Frames from node to `to` on this rail go to a MAC address that nobody has."""
        ip("-n", self.ns(node), "neigh", "replace", f"10.77.{rail}.{to + 1}", "lladdr", "02:00:00:00:00:99",
           "dev", f"rail{rail}", "nud", "permanent")  # fmt: skip

    def limit(self, node: int, rail: int, mbit: int) -> None:
        """What this node sends on the rail, with at most 20 ms of it waiting."""
        tc = ["tc", "-n", self.ns(node), "qdisc", "replace", "dev", f"rail{rail}", "root", "tbf"]
        done = subprocess.run(
            [*tc, "rate", f"{mbit}mbit", "burst", str(max(16_000, mbit * 250)), "latency", "20ms"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def lose_no_more(self, node: int, rail: int, to: int) -> None:
        ip("-n", self.ns(node), "neigh", "del", f"10.77.{rail}.{to + 1}", "dev", f"rail{rail}")

    def outage(self, dice: random.Random, node: int, rail: int, silent_to: int | None) -> None:
        """A rail fails for up to 0.3 s and comes back, now and then with the other one failing meanwhile.

        `silent_to`: frames to that node vanish, carrier up; None: the link goes down."""
        if silent_to is None:
            self.link(node, rail, "down")
        else:
            self.lose_silently(node, rail, silent_to)
        time.sleep(dice.choice([0, 0.01, 0.05, 0.3]))  # the outage itself
        if dice.random() < 0.4:
            self.link(node, 1 - rail, "down")
            time.sleep(dice.choice([0, 0.05, 0.4]))
            self.link(node, 1 - rail, "up")
        if silent_to is None:
            self.link(node, rail, "up")
        else:
            self.lose_no_more(node, rail, silent_to)


class Worker:
    """A ring_worker process, in a namespace if one is given."""

    def __init__(
        self, name: str, incarnation: int, rails: list[tuple[str, str, str]], ns: str = "", **settings: int | str
    ) -> None:
        prefix = ["ip", "netns", "exec", ns] if ns else []
        self.name, self.incarnation = name, incarnation
        argv = [sys.executable, str(WORKER), name, str(incarnation), json.dumps(rails), json.dumps(settings)]
        self.process = subprocess.Popen(prefix + argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoints: list[Any] = self.read()["endpoints"]

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.name} ended with {self.process.wait()}"
        return json.loads(line)

    def write(self, message: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def ask(self, what: str, **more: int) -> Any:
        self.write({"ask": what, **more})
        return self.read()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)  # `ip netns exec` has become the worker itself

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Ranks:
    """Workers in one ring, reducing until told to stop."""

    def __init__(self, net: Net | None, n: int, count: int, pause_s: float = 0.0, **settings: int | str) -> None:
        self.workers: list[Worker] = []
        loopback = [("rail0", "", "127.0.0.1"), ("rail1", "", "127.0.0.2")]
        try:
            for i in range(n):
                rails, ns = (net.rail_list(i), net.ns(i)) if net else (loopback, "")
                self.workers.append(Worker(f"r{i}", i + 1, rails, ns, **settings))
            members = [{"name": w.name, "incarnation": w.incarnation, "rails": w.endpoints} for w in self.workers]
            start = {"members": members, "count": count, "epoch": os.urandom(16).hex(), "pause_s": pause_s}
            for i, worker in enumerate(self.workers):
                worker.write({**start, "me": i})
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    def states(self) -> list[dict[str, Any]]:
        states = [w.ask("state") for w in self.workers]
        assert [s["error"] for s in states] == [""] * len(states)
        return states

    def advance(self, steps: int, timeout_s: float = 90.0) -> float:
        """Wait until everybody has done so many more; the longest a step took, in seconds."""
        goal = min(s["steps"] for s in self.states()) + steps
        longest = [0.0]

        def done() -> bool:
            states = self.states()
            longest[0] = max(longest[0], *(s["longest_s"] for s in states))
            return min(s["steps"] for s in states) >= goal

        eventually(done, f"{steps} more steps", timeout_s, self.workers)
        return longest[0]

    def active(self) -> set[str]:
        """The rails that carry data, of all links at both ends."""
        return {li["rail"] for w in self.workers for li in w.ask("links") if li["active"]}

    def finish(self) -> None:
        """Everybody stops at the same step, in good order."""
        # While the first one stands still the others can be one step ahead at most; then it makes that step too.
        goal = self.workers[0].ask("stand-still")["steps"] + 1
        for worker in reversed(self.workers):
            worker.ask("stop-at", step=goal)
        eventually(lambda: all(s["steps"] == goal for s in self.states()), f"step {goal} everywhere", 30, self.workers)


def eventually(done: Callable[[], bool], what: str, timeout_s: float, workers: list[Worker]) -> None:
    deadline = time.monotonic() + timeout_s * PATIENCE
    while not done():
        if time.monotonic() > deadline:
            facts = [
                (w.ask("state"), w.ask("links"), w.ask("events")[-12:]) for w in workers if w.process.poll() is None
            ]
            raise AssertionError(f"not within {timeout_s} s: {what}; {json.dumps(facts, indent=1)}")
        time.sleep(0.005)
