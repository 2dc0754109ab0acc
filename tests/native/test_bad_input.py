"""What can be wrong about a peer or a host has one stated outcome, and the ring's events say why. Strangers:
test_strangers.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ftar_core.native import core

from .cluster import LOOPBACK, Cluster, options
from .net import Ranks, eventually


def sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_a_killed_rank_whose_child_lives_on_is_gone_at_once() -> None:
    """The child even takes apart what it inherited: that is its own affair, and the parent's links go on."""
    with Ranks(None, 2, count=1000) as ranks:
        ranks.advance(5)
        survivor, other = ranks.workers
        child = other.ask("fork")["pid"]
        try:
            ranks.advance(20)
            other.kill()
            gone = lambda: [e for e in survivor.ask("events") if e["type"] == "peer_gone"]  # noqa: E731
            eventually(lambda: bool(gone()), "peer_gone", 10, [survivor])
            assert "closed all its connections" in gone()[0]["reason"]
            assert sleeps(child)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("rail", "words"),
    [
        (("a", "nosuch0", "127.0.0.1"), r"rail a \(127.0.0.1 on nosuch0\): there is no network device nosuch0"),
        (("a", "lo", "127.99.0.1"), r"rail a \(127.99.0.1 on lo\): lo does not have this address"),
        (("a", "", "203.0.113.7"), r"rail a \(203.0.113.7\): this machine does not have the address"),
        (("a", "", "localhost"), "'localhost' is not a numeric IPv4 or IPv6 address"),
    ],
)
def test_a_rail_that_does_not_exist_or_has_no_such_address(rail: tuple[str, str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        core.Engine("job", b"secret", "r0", 1, [rail], options())


def test_a_link_over_one_rail_is_seen_to_be_unprotected() -> None:
    with Cluster(2, rails=LOOPBACK[:1]) as cluster:
        cluster.start()
        reasons = {link["reason"] for i in range(2) for link in cluster.links(i)}
        assert reasons == {"connected; unprotected: the only rail"}
