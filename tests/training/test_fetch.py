"""A state from several sources at once: what each gives, what happens when one dies, lags, lies or is too slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from ftar_core.training.dial import Identity, Way, dial
from ftar_core.training.follow import Follower, ReplayStep, Snapshot
from ftar_core.training.snapshots import wait_for_copy_s
from ftar_core.training.state import LiveState, look_at_state
from ftar_core.training.stateconn import StateConnection
from ftar_core.training.statewire import Alive, Borrow, Cut, Lent, Want

from .sources import (
    EPOCH,
    RAILS,
    TOKEN,
    Part,
    Proxy,
    Source,
    World,
    assert_snapshot,
    assert_step,
    next_item,
    serve_one,
    settle,
    through,
    until,
)

BIG = 6_000_000  # floats: 24 MB


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    with made.stack:
        yield made


class BigSource(Source):
    """Its state is large enough to take some time."""

    odd = 0.0

    def at_boundary(self) -> None:
        value = torch.arange(BIG, dtype=torch.float32) + self.step
        value += self.odd

        def live() -> LiveState:
            self.copies += 1
            return look_at_state({"part": Held(value)})

        self.server.look(self.step, EPOCH, live, behind_update=True)
        settle(self.server)


class Held:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"big": self.value}

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        raise AssertionError


def big(world: World, name: str, step: int = 5, **options: float) -> BigSource:
    source = BigSource(name, world.plan, step, **options)
    world.stack.callback(source.server.close)
    return source


def assert_big(item: Snapshot | ReplayStep, step: int) -> Snapshot:
    assert isinstance(item, Snapshot)
    assert item.step == step
    assert item.state is not None
    assert torch.equal(item.state.tensors[0], torch.arange(BIG, dtype=torch.float32) + step)
    return item


def all_asked(*sources: Source) -> None:
    """The follower has asked everybody; then all reach the same boundary."""
    for source in sources:
        until(lambda source=source: source.server.shelf.borrowers, f"{source.name} is asked")
    until(lambda: any(source.server.shelf.subscriptions for source in sources), "one is subscribed to")

    def lent() -> bool:
        for source in sources:
            if source.server.wanted():
                source.at_boundary()
        return all(source.server.shelf.held for source in sources)

    until(lent, "everybody holds a copy")


def test_two_sources_give_pieces_of_one_state(world: World) -> None:
    first, second = big(world, "r0", mbit=20), big(world, "r1", mbit=20)
    follower = world.follower(first.info, second.info)
    all_asked(first, second)
    for source in (first, second):
        until(lambda source=source: source.server.limits.fetch_bytes, f"{source.name} gives")
    for source in (first, second):
        source.server.limits.pace.bytes_per_s = 0.0
    item = assert_big(next_item(follower), 5)
    given = dict(item.by_source)
    assert set(given) == {"r0", "r1"}
    assert sum(given.values()) == 4 * BIG, "no byte came twice"
    first.commit()
    assert_step(next_item(follower), 6)
    assert first.copies == second.copies == 1


def test_a_copy_made_for_an_earlier_shadow_is_not_given_for_the_present_state(world: World) -> None:
    first, second = big(world, "r0"), big(world, "r1")
    follower = world.follower(first.info, second.info)
    all_asked(first, second)
    assert_big(next_item(follower), 5)
    follower.close()
    first.commit()
    second.commit()
    later = world.follower(first.info, second.info)
    for source in (first, second):
        until(source.server.wanted, f"{source.name} is asked for a newer copy")
    assert_big(next_item(later, first, second), 6)


def test_when_a_source_dies_the_others_go_on_with_its_pieces(world: World) -> None:
    dying, healthy = big(world, "r1", mbit=60), big(world, "r0", mbit=10)
    follower = world.follower(healthy.info, dying.info)
    all_asked(healthy, dying)
    until(lambda: dying.server.limits.fetch_bytes > 3_000_000, "the fetch is under way")
    dying.server.close()
    healthy.server.limits.pace.bytes_per_s = 0.0
    item = assert_big(next_item(follower), 5)
    given = dict(item.by_source)
    assert 0 < given["r1"] < 4 * BIG
    assert sum(given.values()) == 4 * BIG
    assert healthy.copies == 1


def test_the_source_of_the_stream_may_die_too(world: World) -> None:
    """The other one holds the same state, and takes the stream over where it stopped."""
    dying, healthy = big(world, "r0", mbit=100), big(world, "r1", mbit=100)
    follower = world.follower(dying.info, healthy.info)
    all_asked(dying, healthy)
    dying.commit()
    healthy.commit()
    until(lambda: follower._queued_bytes, "step 6 is kept")
    dying.server.close()
    until(lambda: healthy.server.shelf.subscriptions, "the other is asked for the stream")
    healthy.at_boundary()
    healthy.commit()
    assert_big(next_item(follower), 5)
    assert_step(next_item(follower), 6)
    assert_step(next_item(follower), 7)
    assert healthy.copies == 1


def test_a_single_source_that_comes_back_goes_on_where_it_was(world: World) -> None:
    source = big(world, "r0", mbit=300)
    wires = [Proxy(endpoint, fail_after=9_000_000) for endpoint in source.server.endpoints]
    again = Proxy(source.server.endpoints[0], None)
    for wire in (*wires, again):
        world.stack.callback(wire.close)
    follower = world.follower(through(source.info, *(wire.endpoint for wire in wires), again.endpoint))
    serve_one(source)
    item = assert_big(next_item(follower), 5)
    assert dict(item.by_source) == {"r0": 4 * BIG}
    assert source.copies == 1, "the same copy, over the next rail and the next"
    assert source.server.limits.fetch_bytes < 4 * BIG + 3 * 20 * 1024 * 1024, "what had come was not asked for again"


def test_steps_that_are_made_during_a_long_fetch_are_replayed_behind_it(world: World) -> None:
    source = big(world, "r0", mbit=150)
    follower = world.follower(source.info)
    all_asked(source)
    for _ in range(6):
        source.commit()
        time.sleep(0.1)
    assert follower.poll() is None, "the fetch takes several steps"
    until(lambda: follower._queued_bytes, "the steps are kept")
    source.commit()
    assert_big(next_item(follower), 5)
    for step in range(6, source.step + 1):
        assert_step(next_item(follower), step)


def test_a_full_replay_buffer_begins_again_from_a_newer_snapshot_and_says_what_to_set(world: World) -> None:
    bucket_bytes = sum(b.nbytes for b in world.plan.all_buckets)
    source = big(world, "r0", mbit=80)
    told: list[str] = []
    follower = Follower(
        identity=Identity("job", TOKEN, "r9", 4),
        plan=world.plan,
        rails=RAILS,
        sources=[source.info],
        have=-1,
        on_news=lambda: None,
        buffer_bytes=2 * bucket_bytes,
        on_restart=told.append,
    )
    world.stack.callback(follower.close)
    all_asked(source)
    until(lambda: (follower.fetching or (0, 0))[0] > 2_000_000, "the fetch is under way")
    for _ in range(4):
        source.commit()
    until(lambda: told, "it begins again")
    assert "the replay buffer (2 MB) is full with 2 steps" in told[0]
    assert "set FTAR_REPLAY_BUFFER to" in told[0]
    assert "FTAR_CATCHUP_MBIT of the sources higher" in told[0]
    source.server.limits.pace.bytes_per_s = 0.0  # as the text says
    assert_big(next_item(follower, source), source.step)


def test_sources_that_hold_different_bytes_are_found_out(world: World) -> None:
    """Then the state is fetched from one alone, so that it is somebody's state."""
    first, second = big(world, "r0", mbit=100), big(world, "r1", mbit=100)
    second.odd = 1.0
    told: list[str] = []
    follower = Follower(
        identity=Identity("job", TOKEN, "r9", 4),
        plan=world.plan,
        rails=RAILS,
        sources=[first.info, second.info],
        have=-1,
        on_news=lambda: None,
        on_restart=told.append,
    )
    world.stack.callback(follower.close)
    all_asked(first, second)
    until(lambda: told or follower.poll() is not None, "the end of the fetch")
    assert told
    assert "differs" in told[0]
    for source in (first, second):
        source.server.limits.pace.bytes_per_s = 0.0
    item = next_item(follower, first, second)
    assert isinstance(item, Snapshot)
    assert len(item.by_source) == 1


def test_a_source_that_is_past_the_step_is_left_out(world: World) -> None:
    first, ahead = big(world, "r0", step=5), big(world, "r1", step=6)
    follower = world.follower(first.info, ahead.info)
    all_asked(ahead, first)
    item = assert_big(next_item(follower, ahead), 5)
    assert dict(item.by_source) == {"r0": 4 * BIG}


def test_a_source_that_is_a_step_behind_gives_when_it_gets_there(world: World) -> None:
    first, behind = big(world, "r0", step=6, mbit=20), big(world, "r1", step=5)
    follower = world.follower(first.info, behind.info)
    all_asked(first, behind)
    behind.commit()
    until(lambda: any(b.step == 6 for b in behind.server.shelf.borrowers), "it is asked for step 6")
    behind.at_boundary()
    until(lambda: behind.server.limits.fetch_bytes, "it gives")
    first.server.limits.pace.bytes_per_s = 0.0
    item = assert_big(next_item(follower), 6)
    assert "r1" in dict(item.by_source)


def test_a_copy_that_does_not_get_done_within_a_step_is_abandoned_and_nobody_waits(world: World) -> None:
    source = world.source(step=5)
    world.follower(source.info)
    until(source.server.wanted, "the shadow asks")
    gate = threading.Event()

    class Slow(Part):
        """A tensor whose copy takes as long as the test wants."""

    live = look_at_state({"part": Slow(5.0)})
    copier = source.server.shelf.copier
    original = copier._copy_one
    copier._copy_one = lambda *args: gate.wait(0.2) and original(*args)  # type: ignore[method-assign]
    source.server.look(5, EPOCH, lambda: live, behind_update=True)
    text = source.server.settle()
    assert "does not get done within a step" in text
    assert "snapshot_wait_s" in text
    assert source.server.wanted(), "the shadow waits for the next boundary"
    assert not source.server.shelf.held
    gate.set()
    source.server.look(6, EPOCH, lambda: live, behind_update=True)
    settle(source.server)
    assert list(source.server.shelf.held) == [6]


def test_an_update_waits_only_for_a_copy_that_never_gets_done() -> None:
    waits = [wait_for_copy_s(abandoned, 0.2, 1.0) for abandoned in range(8)]
    assert waits == pytest.approx([0.0, 0.0, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64])
    assert wait_for_copy_s(100, 0.2, 1.0) == 1.0
    assert wait_for_copy_s(100, 0.2, 0.0) == 0.0


def test_pieces_that_are_not_there_end_the_connection(world: World) -> None:
    source = world.source(step=5)
    connection = dial(
        Identity("job", TOKEN, "r9", 4), Way(RAILS[0], source.server.endpoints[0]), lambda connection: None
    )
    try:
        connection.send(Borrow(plan=world.plan.hash, step=-1))
        until(source.server.wanted, "it waits")
        source.at_boundary()
        assert isinstance(_answer(connection), Lent)
        connection.send(Want(piece=1 << 40))
        with pytest.raises(OSError, match="closed"):
            _answer(connection)
    finally:
        connection.close()
    follower = world.follower(source.info)
    assert_snapshot(next_item(follower, source), 5)


def test_a_step_that_is_over_cannot_be_borrowed(world: World) -> None:
    source = world.source(step=5)
    connection = dial(
        Identity("job", TOKEN, "r9", 4), Way(RAILS[0], source.server.endpoints[0]), lambda connection: None
    )
    try:
        connection.send(Borrow(plan=world.plan.hash, step=3))
        until(source.server.wanted, "it waits")
        source.at_boundary()
        answer = _answer(connection)
        assert isinstance(answer, Cut)
        assert answer.reason == "it is past step 3"
    finally:
        connection.close()


def _answer(connection: StateConnection) -> object:
    while isinstance(message := connection.receive(), Alive):
        pass
    return message
