"""Catch-up over real sockets: a shadow gets a state and every step after it, whatever breaks on the way."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from ftar_core.runtime.rails import Rail
from ftar_core.training.follow import Follower, Identity, ReplayStep, Snapshot
from ftar_core.training.plan import BucketPlan, make_plan
from ftar_core.training.state import EncodedState, encode_state
from ftar_core.training.statewire import StateChallenge, StateConnection, StepData
from ftar_core.training.transfer import MAX_STRANGERS, StateServer, StepItem
from ftar_core.wire.ids import NO_EPOCH, EpochId, Term
from ftar_core.wire.messages import Endpoint, MemberInfo, RankInfo, Verdict

TOKEN = b"0123456789abcdef"
RAILS = (Rail("a", "", "127.0.0.1"), Rail("b", "", "127.0.0.2"))
EPOCH = EpochId(Term(1, "c"), 3)
DEADLINE_S = 20.0


def small_plan() -> BucketPlan:
    return make_plan(nn.Linear(300, 1000))


def state_of(value: float) -> EncodedState:
    """A little over two chunks of one tensor."""

    class Part:
        def state_dict(self) -> dict[str, object]:
            return {"big": torch.full((600_000,), value), "empty": torch.zeros(0), "one": torch.tensor(value)}

        def load_state_dict(self, state_dict: dict[str, object], /) -> None:
            raise AssertionError

    return encode_state({"part": Part()})


class Source:
    """A contributor at `step`: its state server, and the two things the training thread does for it."""

    def __init__(self, name: str, plan: BucketPlan, step: int, *, buffer_bytes: int = 1 << 28) -> None:
        self.name, self.plan, self.step = name, plan, step
        self.asked = threading.Event()
        self.copies = 0
        self.server = StateServer(
            job="job", token=TOKEN, plan=plan.hash, rails=RAILS, on_request=self.asked.set, buffer_bytes=buffer_bytes
        )
        self.server.serve(True)

    @property
    def info(self) -> MemberInfo:
        rank = RankInfo(rank=0, node="n", links=(), state=self.server.endpoints)
        return MemberInfo(replica=self.name, incarnation=1, slot=0, ranks=(rank,))

    def at_boundary(self) -> None:
        def copy() -> EncodedState:
            self.copies += 1
            return state_of(float(self.step))

        self.server.attach(self.step, EPOCH, copy)

    def commit(self, verdict: Verdict = Verdict.APPLY) -> None:
        self.step += 1
        buckets = tuple(torch.full((b.count,), self.step, dtype=b.dtype) for b in self.plan.all_buckets)
        if verdict is Verdict.SKIP:
            buckets = ()
        sizes = tuple(b.numel() * b.element_size() for b in buckets)
        header = StepData(step=self.step, epoch=EPOCH, verdict=verdict, contributors=(self.name,), sizes=sizes)
        self.server.publish(StepItem(header, buckets))


class World:
    def __init__(self) -> None:
        self.plan = small_plan()
        self.stack = contextlib.ExitStack()

    def source(self, name: str = "r0", step: int = 5, **options: int) -> Source:
        source = Source(name, self.plan, step, **options)
        self.stack.callback(source.server.close)
        return source

    def follower(self, *sources: MemberInfo, have: int = -1, token: bytes = TOKEN, **options: int) -> Follower:
        follower = Follower(
            identity=Identity("job", token, "r9", 4),
            plan=self.plan,
            rails=RAILS,
            sources=sources,
            have=have,
            on_news=lambda: None,
            **options,
        )
        self.stack.callback(follower.close)
        return follower


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    with made.stack:
        yield made


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.002)


def next_item(follower: Follower) -> Snapshot | ReplayStep:
    found: list[Snapshot | ReplayStep] = []

    def got() -> bool:
        item = follower.poll()
        if item is not None:
            found.append(item)
        return item is not None

    until(got, f"an item ({follower.text})")
    return found[0]


def serve_one(source: Source) -> None:
    until(source.server.wanted, "the shadow asks for a snapshot")
    source.at_boundary()


def assert_snapshot(item: Snapshot | ReplayStep, step: int) -> None:
    assert isinstance(item, Snapshot)
    assert item.step == step
    assert item.epoch == EPOCH
    assert item.state is not None
    expected = state_of(float(step))
    assert item.state.skeleton == expected.skeleton
    assert all(torch.equal(a, b) for a, b in zip(item.state.tensors, expected.tensors, strict=True))


def assert_step(item: Snapshot | ReplayStep, step: int) -> None:
    assert isinstance(item, ReplayStep)
    assert item.step == step
    assert all(bool((bucket == step).all()) for bucket in item.buckets)
    assert len(item.buckets) == len(small_plan().all_buckets)


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
    until(lambda: len(source.server._subscriptions) == 2, "the second asks")
    source.at_boundary()
    assert_snapshot(next_item(first), 5)
    assert_snapshot(next_item(second), 5)
    assert source.copies == 1


class Proxy:
    """A rail that can be cut: forwards TCP to a state server, for a given number of bytes."""

    def __init__(self, target: Endpoint, fail_after: int | None) -> None:
        self._target = (target.addr, target.port)
        self._left = fail_after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(rail=target.rail, addr="127.0.0.1", port=self._listener.getsockname()[1])
        self.connections = 0
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if counted and self._left is not None:
                    self._left -= len(data)
                    if self._left < 0:
                        break
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


def through(info: MemberInfo, *endpoints: Endpoint) -> MemberInfo:
    rank = RankInfo(rank=0, node="n", links=(), state=endpoints)
    return MemberInfo(replica=info.replica, incarnation=info.incarnation, slot=info.slot, ranks=(rank,))


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
    assert broken.connections == 1
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
    serve_one(healthy)
    healthy.commit()
    item = next_item(follower)
    while isinstance(item, Snapshot) and item.source == "r0":
        item = next_item(follower)
    assert_snapshot(item, 6)
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
    serve_one(second)
    second.commit()
    assert_step(next_item(follower), 7)
    assert second.copies == 0


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
    assert time.monotonic() - began < 10, "50 copies of 1.2 MB; a shadow that reads nothing must not matter"


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
    serve_one(source)
    assert_snapshot(next_item(follower), 5)


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
    """A middle box that flips a bit: the checksum drops the connection, the next one fetches the chunk again."""
    source = world.source(step=5)
    first, second = source.server.endpoints
    flipping = FlippingProxy(first, at=700_000)
    world.stack.callback(flipping.close)
    follower = world.follower(through(source.info, flipping.endpoint, second))
    serve_one(source)
    assert_snapshot(next_item(follower), 5)


class FlippingProxy(Proxy):
    def __init__(self, target: Endpoint, at: int) -> None:
        self._at = at
        super().__init__(target, None)

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if counted and passed <= self._at < passed + len(data):
                    changed = bytearray(data)
                    changed[self._at - passed] ^= 0x10
                    data = bytes(changed)
                passed += len(data)
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


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
            StateConnectionOnPair(ours).receive()
        assert StateChallenge(job="j", nonce=b"").job == "j"
        assert NO_EPOCH < EPOCH


class StateConnectionOnPair(StateConnection):
    """A Unix socket pair has no TCP options."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.limit = 64 * 1024
        self.limit_s = 1.0
