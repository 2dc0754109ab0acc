"""What can be wrong about a peer, a handle or a host has one stated outcome and one line that says so (ARCHITECTURE.md
has the table). Strangers, tokens and settings: test_strangers.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from .abi import REMOTE, Plugin
from .rig import Peer, Rig


def ended(rig: Rig, peer: int, words: str) -> None:
    """Its only stream ended with a remote error, and a warning says why: not by a bound that ran out."""
    assert rig.failed(peer) == [REMOTE]
    warnings = [line for line in rig.peers[peer].ask("log") if line.startswith("2 ")]
    assert any(words in line for line in warnings), warnings
    assert not any("given up" in line for line in warnings), warnings


def sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def send_one(peer: Peer, handle: str) -> int:
    comm: int = peer.ask("connect", device=0, handle=handle)
    peer.ask("send", comm=comm, stream=0, sizes=[1], count=1, window=1)
    return comm


def test_nobody_listens_for_the_handle_any_more() -> None:
    with Rig(n=2) as rig:
        listener, handle = rig.peers[1].ask("listen", device=0)
        rig.peers[1].ask("close", kind="listen", comm=listener)
        send_one(rig.peers[0], handle)
        ended(rig, 0, "refused: nobody listens for this handle any more")


def test_the_process_that_listened_is_gone() -> None:
    with Rig(n=2) as rig:
        handle = rig.peers[1].ask("listen", device=0)[1]
        rig.peers[1].kill()
        send_one(rig.peers[0], handle)
        ended(rig, 0, "nobody listens there any more")


def test_a_process_that_listens_on_the_dead_ones_port_is_not_the_one_that_was_meant() -> None:
    """The handle of an earlier life: its secret is not that of the process that has the port now."""
    with Rig(n=1, FTAR_NET_TIMEOUT_S="1") as rig, Peer() as other:
        old = bytearray.fromhex(other.ask("listen", device=0)[1])
        old[8:40] = os.urandom(32)
        send_one(rig.peers[0], old.hex())
        assert rig.failed(0) == [REMOTE]
        assert any("given up" in line for line in rig.peers[0].ask("log"))
        # Whoever was meant by nobody goes on.
        comm = other.ask("connect", device=0, handle=other.ask("listen", device=0)[1])
        other.ask("close", kind="send", comm=comm)


def test_a_handle_used_again_after_its_listener_closed(plugin: Plugin) -> None:
    """The copy of a handle makes a connection of its own while somebody listens, and none afterwards."""
    with Rig(n=1) as rig:
        listener, handle = plugin.listen(0)
        first = rig.peers[0].ask("connect", device=0, handle=handle.hex())
        receive = plugin.accept(listener)
        plugin.close_listen(listener)
        send_one(rig.peers[0], handle.hex())
        ended(rig, 0, "refused: nobody listens for this handle any more")
        rig.peers[0].ask("close", kind="send", comm=first)
        plugin.close_receive(receive)


def test_a_killed_process_whose_child_lives_on_is_found_out_by_its_connections() -> None:
    """A forked child inherits every descriptor; with the connections in it the peer would see nothing but silence."""
    with Rig(n=2) as rig:
        rig.stream(0, 1, rig.connect(0, 1), [1000])
        rig.advance(5)
        child = rig.peers[1].ask("fork")
        try:
            rig.advance(5)  # the child disturbs nobody
            rig.peers[1].kill()
            ended(rig, 0, "closed all its connections")
            assert sleeps(child)
        finally:
            os.kill(child, signal.SIGKILL)
