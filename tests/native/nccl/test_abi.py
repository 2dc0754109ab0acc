"""The plugin as NCCL uses it, on two loopback rails: every version of the interface, every size, closes at any time."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ftar_core.ncclenv import plugin_path

from .abi import ARGUMENT, PROPERTIES, REMOTE, USAGE, VERSIONS, Plugin, PluginError, pair
from .rig import Peer, Rig
from .streams import MEGA, Receiver, Sender

ALL_SIZES = [0, 1, 7, 64, 4096, 65_537, MEGA, 0, 3 * MEGA + 5]


def resources() -> tuple[int, int]:
    """(open files, threads) of this process"""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def returned_to(before: tuple[int, int], timeout_s: float = 60.0) -> None:
    """A thread that was joined may stand in /proc for a moment longer."""
    deadline = time.monotonic() + timeout_s
    while (now := resources()) != before:
        assert time.monotonic() < deadline, f"(open files, threads): {now}, before: {before}"
        time.sleep(0.01)


def test_the_structures_have_the_sizes_that_nccl_reads() -> None:
    assert [ctypes.sizeof(PROPERTIES[v]) for v in VERSIONS] == [64, 112, 128]


def test_nothing_but_the_three_tables_is_exported() -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(plugin_path())], capture_output=True, text=True, check=True
    )
    assert {line.split()[2] for line in listed.stdout.splitlines()} == {f"ncclNetPlugin_v{v}" for v in VERSIONS}


@pytest.mark.parametrize("version", VERSIONS)
def test_devices_and_their_properties(version: int) -> None:
    with Peer(version) as peer:
        assert peer.ask("names") == ["rail0", "rail1"]


def test_properties_say_host_memory_and_one_receive_at_a_time(plugin: Plugin) -> None:
    assert plugin.name.upper() == b"FTAR"
    first, second = plugin.properties(0), plugin.properties(1)
    assert first.ptr_support == 1
    assert first.max_recvs == 1
    assert first.max_comms > 1000
    assert (first.vprops.ndevs, first.vprops.devs[0], second.vprops.devs[0]) == (1, 0, 1)
    assert first.max_p2p_bytes == 1 << 40
    assert (first.rail_id, first.plane_id) == (-1, -1)
    assert first.guid != second.guid
    with pytest.raises(PluginError) as refused:
        plugin.properties(2)
    assert refused.value.code == ARGUMENT
    assert "finalize" in plugin.present
    assert {"regMrDmaBuf", "getDeviceMr", "makeVDevice"}.isdisjoint(plugin.present)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_size_in_two_processes_both_ways(version: int) -> None:
    with Rig(version=version) as rig:
        for sender, receiver, there, here in [(0, 1, 0, 0), (1, 0, 1, 1), (0, 1, 1, 0), (1, 0, 0, 1)]:
            rig.stream(sender, receiver, rig.connect(sender, receiver, there, here), ALL_SIZES, count=40)
        rig.finish(40)
        for peer in rig.peers:
            assert not any(line.startswith("2 ") for line in peer.ask("log")), rig.logs()


def test_sixteen_megabytes_and_no_logger() -> None:
    plugin = Plugin(plugin_path(), 12, log=False)
    send, receive = pair(plugin)
    streams = [Receiver(plugin, receive, 3, [16 * MEGA, 0], 6, 2), Sender(plugin, send, 3, [16 * MEGA, 0], 6, 2)]
    for s in streams:
        s.start()
    for s in streams:
        s.join(60)
        assert (s.error, s.done) == ("", 6)
    plugin.close_send(send)
    plugin.close_receive(receive)
    plugin.close()


def test_many_connections_and_threads_at_once_from_copies_of_one_handle(plugin: Plugin) -> None:
    n = 12
    listener, handle = plugin.listen(0)
    sends = [plugin.connect(i % 2, handle) for i in range(n)]
    receives = [plugin.accept(listener) for _ in range(n)]
    # Which is which only the first message says; both ends of it are ours here.
    tell = np.zeros(n, np.uint64)
    heard = np.zeros(n, np.uint64)
    for i, comm in enumerate(sends):
        tell[i] = 1000 + i
        requests = [plugin.isend(comm, tell[i:].ctypes.data, 8)]
        assert all(requests)
    requests = [plugin.irecv(comm, heard[i:].ctypes.data, 8) for i, comm in enumerate(receives)]
    for request in requests:
        assert plugin.wait(request) == 8
    assert sorted(heard) == [1000 + i for i in range(n)]
    streams = []
    for i, comm in enumerate(receives):
        stream = int(heard[i]) - 1000
        streams.append(Receiver(plugin, comm, stream, ALL_SIZES[:6], 60, 8))
        streams.append(Sender(plugin, sends[stream], stream, ALL_SIZES[:6], 60, 8))
    for s in streams:
        s.start()
    for s in streams:
        s.join(60)
        assert (s.error, s.done) == ("", 60)
    for comm in sends:
        plugin.close_send(comm)
    for comm in receives:
        plugin.close_receive(comm)
    plugin.close_listen(listener)


def test_thirty_two_requests_in_flight_and_matching_in_posting_order(plugin: Plugin) -> None:
    send, receive = pair(plugin)
    out = np.arange(32 * 100, dtype=np.uint32).reshape(32, 100)
    into = np.zeros_like(out)
    sent = [plugin.isend(send, row.ctypes.data, 4 * i) for i, row in enumerate(out)]
    assert all(sent)
    time.sleep(0.05)  # nobody receives yet: nothing may be done
    assert [plugin.test(r) for r in sent] == [None] * 32
    received = [plugin.irecv(receive, row.ctypes.data, 400, optional=i % 2 == 0) for i, row in enumerate(into)]
    assert all(received)
    assert 1 not in received
    for i, request in enumerate(reversed(received)):  # looked at in any order
        assert plugin.wait(request) == 4 * (31 - i)
    for i, request in enumerate(sent):
        assert plugin.wait(request) == 4 * i
        assert (into[i, :i] == out[i, :i]).all()
        assert (into[i, i:] == 0).all()
    plugin.close_send(send)
    plugin.close_receive(receive)


def test_more_requests_than_there_are_slots_are_tried_later(plugin: Plugin) -> None:
    send, receive = pair(plugin)
    byte = np.zeros(1, np.uint8)
    taken = 0
    while request := plugin.isend(send, byte.ctypes.data, 1):
        taken += 1
        last = request
        assert taken < 10_000
    assert taken >= 32
    for _ in range(taken):
        while not (request := plugin.irecv(receive, byte.ctypes.data, 1)):
            time.sleep(0.001)
        plugin.wait(request)
    plugin.wait(last)
    plugin.close_send(send)
    plugin.close_receive(receive)


def test_a_receive_that_is_too_small_is_an_error_at_both_ends(plugin: Plugin) -> None:
    send, receive = pair(plugin)
    data, into = np.ones(100, np.uint8), np.zeros(100, np.uint8)
    received = plugin.irecv(receive, into.ctypes.data, 50)
    sent = plugin.isend(send, data.ctypes.data, 100)
    with pytest.raises(PluginError) as at_receiver:
        plugin.wait(received)
    assert at_receiver.value.code == USAGE
    with pytest.raises(PluginError) as at_sender:
        plugin.wait(sent)
    assert at_sender.value.code == REMOTE
    assert not into.any()
    assert any("100 bytes met a receive of 50 bytes" in line for line in plugin.lines)
    plugin.close_send(send)
    plugin.close_receive(receive)


def test_several_receives_in_one_and_device_memory_are_refused(plugin: Plugin) -> None:
    send, receive = pair(plugin)
    two = (ctypes.c_void_p * 2)()
    sizes, tags, request = (ctypes.c_size_t * 2)(), (ctypes.c_int * 2)(), ctypes.c_void_p()
    code = plugin.calls["irecv"](receive, 2, two, sizes, tags, two, two, ctypes.byref(request))
    assert code == ARGUMENT
    with pytest.raises(PluginError):
        plugin.register(send, 4096, 4096, kind=2)
    plugin.close_send(send)
    plugin.close_receive(receive)


def test_connect_and_accept_never_wait(impatient: None, plugin: Plugin) -> None:
    listener, handle = plugin.listen(0)
    begun = time.monotonic()
    for _ in range(200):
        assert plugin.try_accept(listener) == 0
    plugin.close_listen(listener)
    send = plugin.try_connect(0, handle)  # nobody listens any more: that is found out later
    assert time.monotonic() - begun < 60
    byte = np.zeros(1, np.uint8)
    with pytest.raises(PluginError) as gone:  # from either call: it may be known already
        plugin.wait(plugin.isend(send, byte.ctypes.data, 1), 90)
    assert gone.value.code == REMOTE
    plugin.close_send(send)


@pytest.mark.parametrize("first", ["send", "receive"])
def test_closing_with_requests_in_flight_is_safe_and_the_other_end_hears_of_it(first: str) -> None:
    with Rig() as rig:
        send, receive = rig.connect(0, 1)
        rig.stream(0, 1, (send, receive), [MEGA, 0, 5], window=16)
        rig.advance(20)
        closer, comm = (0, send) if first == "send" else (1, receive)
        rig.peers[1].ask("stop")  # nobody receives any more: the sender's requests stay in flight, and posted receives
        time.sleep(0.05)
        if first == "send":
            rig.peers[0].ask("abandon")
        rig.peers[closer].ask("close", kind=first, comm=comm)
        if first == "receive":
            assert rig.failed(0) == [REMOTE]
        send, receive = rig.connect(0, 1)  # the processes are well
        assert send
        assert receive


def test_closing_at_every_moment_of_a_handshake_leaks_nothing(plugin: Plugin) -> None:
    pair_now = pair(plugin)
    before = resources()
    for wait_s in [0, 0.0005, 0.002, 0.01, 0.03] * 4:
        listener, handle = plugin.listen(0)
        sends = [plugin.connect(i % 2, handle) for i in range(3)]
        time.sleep(wait_s)
        comm = plugin.try_accept(listener)
        plugin.close_send(sends[0])
        if comm:
            plugin.close_receive(comm)
        plugin.close_listen(listener)
        for send in sends[1:]:
            plugin.close_send(send)
    returned_to(before)
    for close, comm in zip((plugin.close_send, plugin.close_receive), pair_now, strict=True):
        close(comm)


def test_the_last_finalize_leaves_nothing_behind() -> None:
    before = resources()
    first, second = Plugin(plugin_path(), 12), Plugin(plugin_path(), 11)  # two communicators, one process
    assert resources()[1] == before[1] + 2  # one thread that moves bytes and one that logs, for both
    send, receive = pair(first)
    first.close()
    second.close()
    byte = np.full(1, 5, np.uint8)
    sent, received = first.isend(send, byte.ctypes.data, 1), first.irecv(receive, byte.ctypes.data, 1)
    first.wait(sent)
    first.wait(received)  # a connection outlives the communicator that made it until it is closed
    first.close_send(send)
    first.close_receive(receive)
    returned_to(before)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_process_that_never_closes_anything_ends_well(version: int) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from pathlib import Path
from native.nccl.abi import Plugin
p = Plugin(Path({str(plugin_path())!r}), {version})
l, h = p.listen(0)
s, r = p.connect(1, h), p.accept(l)
import ctypes
malloc = ctypes.CDLL(None).malloc
malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
size = 1 << 22
out, into = malloc(size), malloc(size)  # NCCL's buffers: Python would free its own before the plugin stops
for _ in range(5): p.isend(s, out, size)
p.irecv(r, into, size)
print("in flight", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "in flight\n"), done.stderr


def test_a_killed_peer_is_a_remote_error_at_once() -> None:
    with Rig(FTAR_NET_TIMEOUT_S="300") as rig:
        for sender, receiver in [(0, 1), (1, 0)]:
            rig.stream(sender, receiver, rig.connect(sender, receiver), [100_000])
        rig.advance(10)
        rig.peers[1].kill()
        begun = time.monotonic()
        assert rig.failed(0) == [REMOTE, REMOTE]
        assert time.monotonic() - begun < 90  # far below the bound: its kernel said so


def test_a_frozen_peer_is_waited_for_and_then_a_remote_error() -> None:
    import signal

    with Rig(FTAR_NET_TIMEOUT_S="2") as rig:
        rig.stream(0, 1, rig.connect(0, 1), [100_000])
        rig.advance(10)
        rig.peers[1].signal(signal.SIGSTOP)
        time.sleep(0.3)
        rig.peers[1].signal(signal.SIGCONT)
        rig.advance(10)  # a moment's freeze costs nothing
        rig.peers[1].signal(signal.SIGSTOP)
        try:
            assert rig.failed(0) == [REMOTE]
        finally:
            rig.peers[1].signal(signal.SIGCONT)


def test_communicators_come_and_go_in_several_threads() -> None:
    before = resources()
    errors: list[Exception] = []

    def life() -> None:
        try:
            for _ in range(5):
                plugin = Plugin(plugin_path(), 12)
                send, receive = pair(plugin)
                byte = np.zeros(1, np.uint8)
                sent, received = plugin.isend(send, byte.ctypes.data, 1), plugin.irecv(receive, byte.ctypes.data, 1)
                plugin.wait(sent)
                plugin.wait(received)
                plugin.close_send(send)
                plugin.close_receive(receive)
                plugin.close()
        except Exception as error:
            errors.append(error)

    lives = [threading.Thread(target=life) for _ in range(4)]
    for t in lives:
        t.start()
    for t in lives:
        t.join()
    assert errors == []
    returned_to(before)
