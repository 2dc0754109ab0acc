"""What can be wrong about a peer or a host has one stated outcome, and the ring's events say why. Strangers:
test_strangers.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

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
