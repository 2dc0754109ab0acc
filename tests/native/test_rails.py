"""Cables are pulled under traffic: no result is wrong, no result is missing, and the traffic returns."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

import pytest

from .net import NAMESPACES, Net, Ranks, eventually

pytestmark = NAMESPACES
QUICK = {"hold_down_ms": 20, "hold_down_max_ms": 20, "probe_interval_ms": 10}


@pytest.fixture
def net() -> Iterator[Net]:
    with Net(nodes=2) as made:
        yield made


def test_the_primary_rail_of_one_node_goes_down_and_comes_back_five_times(net: Net) -> None:
    with Ranks(net, 2, count=200_000, **QUICK) as ranks:
        ranks.advance(5)
        assert ranks.active() == {"rail0"}
        for _ in range(5):
            net.link(0, 0, "down")
            longest = ranks.advance(10)
            assert ranks.active() == {"rail1"}
            assert longest < 5  # a bound for liveness; the benchmark has the number
            net.link(0, 0, "up")
            eventually(lambda: ranks.active() == {"rail0"}, "traffic back on rail0", 90, ranks.workers)
            ranks.advance(5)
        ranks.finish()
        links = [li for w in ranks.workers for li in w.ask("links")]
        assert all(li["state"] == "UP" for li in links)
        # The near end saw its carrier go, the far end was told over the other rail.
        near, far = ([e["reason"] for e in w.ask("events") if e.get("state") == "DOWN"] for w in ranks.workers)
        assert any("no carrier" in reason for reason in near)
        assert any(reason.startswith("the peer says") or "gave this rail up" in reason for reason in far)


def test_frames_vanish_on_a_rail_whose_carrier_is_up(net: Net) -> None:
    with Ranks(net, 2, count=200_000, **QUICK) as ranks:
        ranks.advance(5)
        net.lose_silently(0, 0, to=1)
        ranks.advance(10)
        assert ranks.active() == {"rail1"}
        reasons = [e["reason"] for w in ranks.workers for e in w.ask("events") if e.get("state") == "DOWN"]
        assert any("silent for" in reason for reason in reasons)
        net.lose_no_more(0, 0, to=1)
        eventually(lambda: ranks.active() == {"rail0"}, "traffic back on rail0", 90, ranks.workers)
        ranks.finish()


def test_the_backup_dies_and_nobody_notices(net: Net) -> None:
    with Ranks(net, 2, count=50_000, **QUICK) as ranks:
        ranks.advance(5)
        net.link(1, 1, "down")
        ranks.advance(10)
        assert ranks.active() == {"rail0"}
        assert all(li["resumes"] == 0 for w in ranks.workers for li in w.ask("links"))
        net.link(1, 1, "up")
        eventually(
            lambda: all(li["state"] == "UP" for w in ranks.workers for li in w.ask("links")),
            "repair",
            90,
            ranks.workers,
        )
        ranks.finish()


def test_all_rails_dead_is_reported_and_survived(net: Net) -> None:
    with Ranks(net, 2, count=50_000, **QUICK) as ranks:
        ranks.advance(5)
        for rail in (0, 1):
            net.link(0, rail, "down")
        eventually(
            lambda: all(any(e["type"] == "unreachable" for e in w.ask("events")) for w in ranks.workers),
            "both ends say that they cannot reach the other",
            90,
            ranks.workers,
        )
        for rail in (1, 0):
            net.link(0, rail, "up")
        ranks.advance(10)
        eventually(lambda: ranks.active() == {"rail0"}, "traffic back on rail0", 90, ranks.workers)
        assert not any(e["type"] == "peer_gone" for w in ranks.workers for e in w.ask("events"))
        ranks.finish()


def test_a_peer_that_freezes_for_a_moment_moves_no_traffic(net: Net) -> None:
    with Ranks(net, 2, count=50_000, pause_s=0.002, **QUICK) as ranks:
        ranks.advance(5)
        for _ in range(3):
            ranks.workers[1].signal(signal.SIGSTOP)
            time.sleep(0.2)  # the freeze itself
            ranks.workers[1].signal(signal.SIGCONT)
            ranks.advance(10)
        assert ranks.active() == {"rail0"}
        assert [li["flaps"] for w in ranks.workers for li in w.ask("links")] == [0] * 8
        ranks.finish()


def test_a_killed_peer_is_gone_at_once(net: Net) -> None:
    with Ranks(net, 2, count=50_000, **QUICK) as ranks:
        ranks.advance(5)
        survivor = ranks.workers[0]
        killed_at = time.monotonic()
        ranks.workers[1].kill()
        gone = lambda: [e for e in survivor.ask("events") if e["type"] == "peer_gone"]  # noqa: E731
        eventually(lambda: bool(gone()), "peer_gone", 10, [survivor])
        assert gone()[0]["peer"] == "r1"
        assert gone()[0]["time"] - killed_at < 5
        assert "r1" in survivor.ask("state")["error"]  # what waited for it has failed, with its name


def test_the_cable_is_pulled_while_a_killed_peer_is_still_on_the_backup(net: Net) -> None:
    with Ranks(net, 2, count=200_000, **QUICK) as ranks:
        ranks.advance(5)
        net.link(0, 0, "down")
        ranks.advance(5)
        ranks.workers[1].kill()
        survivor = ranks.workers[0]
        eventually(lambda: any(e["type"] == "peer_gone" for e in survivor.ask("events")), "peer_gone", 10, [survivor])


def test_a_flapping_rail_is_held_down_longer_each_time(net: Net) -> None:
    with Ranks(net, 2, count=20_000, hold_down_ms=100, hold_down_max_ms=60000, probe_interval_ms=5) as ranks:
        ranks.advance(5)
        holds: list[int] = []
        for _ in range(3):
            net.link(0, 0, "down")
            eventually(lambda: ranks.active() == {"rail1"}, "traffic on rail1", 20, ranks.workers)
            net.link(0, 0, "up")
            eventually(lambda: ranks.active() == {"rail0"}, "traffic back on rail0", 90, ranks.workers)
            held = [
                e["reason"]
                for e in ranks.workers[0].ask("events")
                if e.get("state") == "HOLD" and e["direction"] == "out"
            ]
            holds.append(int(held[-1].split("held down for ")[1].split(" ms")[0]))
        assert holds == [100, 200, 400]
        ranks.finish()


@pytest.mark.parametrize("seed", [1, 2])
def test_anything_pulled_at_any_time_costs_no_result(seed: int) -> None:
    """Three members; cables pulled and frames lost at random, both rails at once too."""
    dice = random.Random(seed)
    with Net(nodes=3) as net, Ranks(net, 3, count=dice.choice([30, 60_000, 400_000]), **QUICK) as ranks:
        ranks.advance(5)
        for _ in range(12):
            node, rail, other = dice.randrange(3), dice.randrange(2), dice.choice([1, 2])
            silent = dice.random() < 0.3
            net.outage(dice, node, rail, (node + other) % 3 if silent else None)
        ranks.advance(10)
        eventually(lambda: ranks.active() == {"rail0"}, "traffic back on rail0", 30, ranks.workers)
        ranks.finish()
        assert not any(e["type"] == "peer_gone" for w in ranks.workers for e in w.ask("events"))
