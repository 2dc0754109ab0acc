"""Catch-up over real sockets: a shadow gets a state and every step after it, whatever breaks on the way."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from torch import nn

from ftar_core.training.dial import Identity
from ftar_core.training.follow import Follower, ReplayStep
from ftar_core.training.plan import make_plan
from ftar_core.training.stateconn import StateConnection
from ftar_core.training.statewire import StateChallenge
from ftar_core.training.transfer import MAX_STRANGERS
from ftar_core.wire.ids import NO_EPOCH
from ftar_core.wire.messages import Endpoint, Verdict

from .sources import (
    EPOCH,
    RAILS,
    TOKEN,
    FlippingProxy,
    Proxy,
    World,
    assert_snapshot,
    assert_step,
    next_item,
    serve_one,
    through,
    until,
)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    with made.stack:
        yield made


def test_a_shadow_gets_the_state_and_every_later_step(world: World) -> None:
    source = world.source(step=5)
    follower = world.follower(source.info)
    serve_one(source)
    source.commit()
    source.commit()
    assert_snapshot(next_item(follower), 5)
    assert_step(next_item(follower), 6)
    assert_step(next_item(follower), 7)
    until(lambda: follower.connected, "the stream runs")
    source.commit(Verdict.SKIP)
    skipped = next_item(follower)
    assert isinstance(skipped, ReplayStep)
    assert (skipped.step, skipped.verdict, skipped.buckets) == (8, Verdict.SKIP, ())


def test_two_shadows_share_one_copy(world: World) -> None:
    source = world.source()
    first = world.follower(source.info)
    until(source.server.wanted, "the first asks")
    second = Follower(
        identity=Identity("job", TOKEN, "r8", 5),
        plan=world.plan,
        rails=RAILS,
        sources=[source.info],
        have=-1,
        on_news=lambda: None,
    )
    world.stack.callback(second.close)
    until(lambda: len(source.server.shelf.subscriptions) == 2, "the second asks")
    source.at_boundary()
    assert_snapshot(next_item(first), 5)
    assert_snapshot(next_item(second), 5)
    assert source.copies == 1


def test_a_rail_that_fails_in_the_middle_of_the_state_costs_no_byte_twice(world: World) -> None:
    source = world.source(step=5)
    first, second = source.server.endpoints
    broken = Proxy(first, fail_after=1_500_000)  # in the second chunk of the big tensor
    world.stack.callback(broken.close)
    follower = world.follower(through(source.info, broken.endpoint, second))
    serve_one(source)
    source.commit()
    assert_snapshot(next_item(follower), 5)
    assert_step(next_item(follower), 6)
    assert broken.connections == 2, "of the stream and of the fetch: neither came back to a rail that had failed"
    assert source.copies == 1, "the second rail goes on where the first stopped, with the same snapshot"


def test_a_rail_that_fails_in_the_stream_loses_no_step(world: World) -> None:
    source = world.source(step=5)
    first, second = source.server.endpoints
    bucket_bytes = sum(b.nbytes for b in world.plan.all_buckets)
    broken = Proxy(first, fail_after=2_450_000 + bucket_bytes)
    world.stack.callback(broken.close)
    follower = world.follower(through(source.info, broken.endpoint, second))
    serve_one(source)
    assert_snapshot(next_item(follower), 5)
    for step in range(6, 12):
        source.commit()
        assert_step(next_item(follower), step)
    assert source.copies == 1


def test_a_source_killed_in_the_middle_of_a_fetch_is_replaced_by_another(world: World) -> None:
    dying, healthy = world.source("r0", step=5), world.source("r1", step=6)
    wires = [Proxy(endpoint, fail_after=1_200_000) for endpoint in dying.server.endpoints]
    for wire in wires:
        world.stack.callback(wire.close)
    follower = world.follower(through(dying.info, *(wire.endpoint for wire in wires)), healthy.info)
    serve_one(dying)
    until(lambda: all(wire._left is not None and wire._left < 0 for wire in wires[:1]), "the first wire breaks")
    dying.server.close()
    assert_snapshot(next_item(follower, healthy), 6)
    healthy.commit()
    assert_step(next_item(follower), 7)


def test_a_follower_changes_sources_without_a_second_snapshot(world: World) -> None:
    first, second = world.source("r0", step=5), world.source("r1", step=5)
    follower = world.follower(first.info, second.info)
    serve_one(first)
    assert_snapshot(next_item(follower), 5)
    first.commit()
    assert_step(next_item(follower), 6)
    first.server.close()
    second.commit()  # the same committed step, on the other replica
    until(lambda: second.server.shelf.subscriptions, "the second source is subscribed to")
    second.at_boundary()
    second.commit()
    assert_step(next_item(follower), 7)


def test_a_source_one_commit_behind_is_no_reason_for_a_second_snapshot(world: World) -> None:
    behind = world.source("r1", step=5)
    follower = world.follower(behind.info, have=6)
    serve_one(behind)
    behind.commit()  # step 6, which the shadow has from a source that died
    behind.commit()
    assert_step(next_item(follower), 7)
    assert behind.copies == 0


def test_a_source_that_is_no_contributor_any_more_is_left_at_once(world: World) -> None:
    old, new = world.source("r0", step=5), world.source("r1", step=5)
    follower = world.follower(old.info)
    serve_one(old)
    assert_snapshot(next_item(follower), 5)
    follower.set_sources([new.info])
    serve_one(new)
    new.commit()
    assert_step(next_item(follower), 6)


def test_a_shadow_that_does_not_keep_up_is_cut_and_begins_again(world: World) -> None:
    bucket_bytes = sum(b.nbytes for b in world.plan.all_buckets)
    source = world.source(step=5, buffer_bytes=2 * bucket_bytes)
    follower = world.follower(source.info, buffer_bytes=2 * bucket_bytes)
    serve_one(source)
    for _ in range(20):  # nobody polls
        source.commit()
        time.sleep(0.001)
    until(source.server.wanted, "the shadow asks for a newer snapshot")
    source.at_boundary()
    steps: list[int] = []
    while not steps or steps[-1] != source.step:
        item = next_item(follower)
        if isinstance(item, ReplayStep) and steps:
            assert item.step == steps[-1] + 1
        steps.append(item.step)
    source.commit()
    assert_step(next_item(follower), source.step)


def test_the_training_thread_never_waits_for_a_shadow(world: World) -> None:
    source = world.source(step=5)
    world.follower(source.info)
    serve_one(source)
    began = time.monotonic()
    for _ in range(50):
        source.commit()
    assert time.monotonic() - began < 60, "50 copies of 1.2 MB; a shadow that reads nothing must not matter"


def test_another_model_is_refused_with_the_reason(world: World) -> None:
    source = world.source()
    world.plan = make_plan(nn.Linear(3, 3))
    follower = world.follower(source.info)
    until(lambda: follower.refused, "the refusal")
    assert "another bucket plan" in follower.refused


def test_a_wrong_token_gets_nothing_and_a_false_server_is_not_believed(world: World) -> None:
    source = world.source()
    follower = world.follower(source.info, token=b"another token 1234")
    until(lambda: follower.refused, "the refusal")
    assert not source.server.wanted()


def test_a_replica_that_is_a_shadow_itself_serves_nobody(world: World) -> None:
    source = world.source()
    source.server.serve(False)
    follower = world.follower(source.info)
    until(lambda: "holds no state" in follower.text, "the reason is shown")
    source.server.serve(True)
    assert_snapshot(next_item(follower, source), 5)


def test_junk_on_the_port_disturbs_nothing(world: World) -> None:
    source = world.source(step=5)
    address = (source.server.endpoints[0].addr, source.server.endpoints[0].port)
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\x00\x00\x00\x00", b""):
        with socket.create_connection(address) as stranger:
            stranger.sendall(junk)
    idle = [socket.create_connection(address) for _ in range(5)]
    try:
        follower = world.follower(source.info)
        serve_one(source)
        assert_snapshot(next_item(follower), 5)
    finally:
        for sock in idle:
            sock.close()
    until(lambda: len(source.server._connections) == 1, "strangers are dropped")


def test_a_flood_of_half_open_connections_does_not_lock_a_shadow_out(world: World) -> None:
    """Somebody keeps more connections open than the server takes, on every rail, and opens them again when dropped."""
    source = world.source(step=5)
    flooding = threading.Event()
    flooding.set()
    held: list[socket.socket] = []

    def flood() -> None:
        while flooding.is_set():
            for endpoint in source.server.endpoints:
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection((endpoint.addr, endpoint.port), timeout=1.0))
            while len(held) > 6 * MAX_STRANGERS:
                held.pop(0).close()
            time.sleep(0.001)

    flooder = threading.Thread(target=flood)
    flooder.start()
    try:
        until(lambda: len(held) > 3 * MAX_STRANGERS, "the flood")
        follower = world.follower(source.info)
        serve_one(source)
        assert_snapshot(next_item(follower), 5)
        source.commit()
        assert_step(next_item(follower), 6)
    finally:
        flooding.clear()
        flooder.join()
        for sock in held:
            sock.close()
    until(lambda: len(source.server._connections) == 1, "strangers are dropped")


def test_a_damaged_chunk_is_noticed_and_fetched_again(world: World) -> None:
    """A middle box that flips a bit: the checksum finds it, and the piece is asked for again."""
    source = world.source(step=5)
    first, second = source.server.endpoints
    flipping = FlippingProxy(first, at=700_000)
    world.stack.callback(flipping.close)
    follower = world.follower(through(source.info, flipping.endpoint, second))
    serve_one(source)
    assert_snapshot(next_item(follower), 5)


def test_a_server_that_says_nothing_is_given_up_within_bounds(world: World) -> None:
    """A half-open connection: the shadow goes on with another source."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint(rail="a", addr="127.0.0.1", port=silent.getsockname()[1])
        healthy = world.source("r1", step=5)
        follower = world.follower(through(healthy.info, endpoint, healthy.server.endpoints[1]))
        serve_one(healthy)
        assert_snapshot(next_item(follower), 5)


def test_a_frame_longer_than_a_stranger_may_send_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((1 << 20).to_bytes(4, "little"))
        with pytest.raises(Exception, match="frame of 1048576 bytes"):
            StateConnection(ours).receive()
        assert StateChallenge(job="j", nonce=b"").job == "j"
        assert NO_EPOCH < EPOCH
