"""The all-reduce gives every member the same bits, and the bits of the obvious loop."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ftar_core.native import core

from .cluster import NUMPY_TYPES, Cluster, new_epoch, random_array, ring_sum

if TYPE_CHECKING:
    from ftar_core.native._core import Event

# Around the boundaries of chunk (4096 bytes here), segment and the small-buffer way (8192 bytes).
SIZES = [0, 1, 2, 3, 5, 1023, 1024, 2047, 2048, 2049, 4096, 4097, 8192, 8193, 100_003]


@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_every_type_and_size_gives_the_bits_of_the_dumb_loop(members: int) -> None:
    rng = np.random.default_rng(members)
    with Cluster(members, chunk_bytes=4096, window_bytes=65536) as cluster:
        epoch = cluster.start()
        for number, (dtype, size) in enumerate((d, s) for d in NUMPY_TYPES for s in SIZES):
            sources = [random_array(rng, size, dtype) for _ in range(members)]
            before = [s.tobytes() for s in sources]
            results = cluster.all_reduce(epoch, 1, number, sources, dtype)
            wanted = ring_sum(sources, dtype).tobytes()
            assert [r.tobytes() for r in results] == [wanted] * members, (dtype, size)
            assert [s.tobytes() for s in sources] == before, "the inputs must survive for a retry"


def test_large_buffers_many_at_a_time() -> None:
    rng = np.random.default_rng(7)
    with Cluster(3) as cluster:
        epoch = cluster.start()
        plan = [3_000_001, 17, 250_000, 0, 1_000_000]
        sources = {b: [random_array(rng, n, "float32") for _ in range(3)] for b, n in enumerate(plan)}
        results = {b: [np.zeros(n, np.float32) for _ in range(3)] for b, n in enumerate(plan)}
        for b in sources:
            for i in range(3):
                cluster.submit(i, epoch, 1, b, sources[b][i], results[b][i], "float32")
        for b, inputs in sources.items():
            for i in range(3):
                cluster.reduced(i, epoch, 1, b)
            assert {r.tobytes() for r in results[b]} == {ring_sum(inputs, "float32").tobytes()}


def test_members_may_submit_in_any_order() -> None:
    rng = np.random.default_rng(8)
    shuffle = random.Random(8)
    with Cluster(4, chunk_bytes=4096, window_bytes=8192) as cluster:
        epoch = cluster.start()
        for step in range(10):
            counts = [shuffle.choice([3, 900, 70_000]) for _ in range(6)]
            sources = [[random_array(rng, n, "float32") for _ in range(4)] for n in counts]
            results = [[np.zeros(n, np.float32) for _ in range(4)] for n in counts]
            todo = [(i, b) for i in range(4) for b in range(6)]
            shuffle.shuffle(todo)
            for i, b in todo:
                cluster.submit(i, epoch, step, b, sources[b][i], results[b][i], "float32")
            for i, b in todo:
                cluster.reduced(i, epoch, step, b)
            for b in range(6):
                assert {r.tobytes() for r in results[b]} == {ring_sum(sources[b], "float32").tobytes()}


def test_a_member_that_is_late_by_a_whole_step_only_holds_the_others_back() -> None:
    rng = np.random.default_rng(9)
    with Cluster(2, window_bytes=1 << 20) as cluster:
        epoch = cluster.start()
        sources = [[random_array(rng, 2_000_000, "float32") for _ in range(2)] for _ in range(3)]
        results = [[np.zeros(2_000_000, np.float32) for _ in range(2)] for _ in range(3)]
        for step in range(3):  # 24 MB waits for a member that has submitted nothing
            cluster.submit(0, epoch, step, 0, sources[step][0], results[step][0], "float32")
        cluster.collect(0, 0.3)
        assert "reduced" not in cluster.types(0)
        for step in range(3):
            cluster.submit(1, epoch, step, 0, sources[step][1], results[step][1], "float32")
        for step in range(3):
            for i in range(2):
                cluster.reduced(i, epoch, step, 0)
            assert {r.tobytes() for r in results[step]} == {ring_sum(sources[step], "float32").tobytes()}
        assert all(link["flaps"] == 0 for i in range(2) for link in cluster.links(i))


def test_abort_in_mid_flight_then_a_retry_in_the_next_epoch_from_the_same_inputs() -> None:
    rng = np.random.default_rng(10)
    with Cluster(3) as cluster:
        sources = [random_array(rng, 4_000_000, "float32") for _ in range(3)]
        wanted = ring_sum(sources, "float32").tobytes()
        for attempt in range(8):
            epoch = cluster.start()
            results = [np.zeros(4_000_000, np.float32) for _ in range(3)]
            for i in range(3):
                cluster.submit(i, epoch, 1, 0, sources[i], results[i], "float32")
            cluster.collect(0, 0.002 * attempt)
            following = new_epoch()
            cluster.prepare(following, [0, 1, 2])
            for i in (attempt % 3, (attempt + 1) % 3, (attempt + 2) % 3):
                if attempt % 2:
                    cluster.engines[i].abort()
                cluster.engines[i].activate(following)
                results[i][:] = -1  # from now on nobody else may write here
            results = [np.full(4_000_000, -1, np.float32) for _ in range(3)]
            for i in range(3):
                cluster.submit(i, following, 1, 0, sources[i], results[i], "float32")
            for i in range(3):
                cluster.reduced(i, following, 1, 0)
            assert [r.tobytes() for r in results] == [wanted] * 3


def test_after_abort_returned_nobody_touches_the_buffers() -> None:
    with Cluster(2) as cluster:
        for _ in range(5):
            epoch = cluster.start()
            src = [np.ones(8_000_000, np.float32) for _ in range(2)]
            dst = [np.zeros(8_000_000, np.float32) for _ in range(2)]
            for i in range(2):
                cluster.submit(i, epoch, 1, 0, src[i], dst[i], "float32")
            cluster.collect(0, 0.003)
            cluster.engines[0].abort()
            dst[0][:] = 7
            cluster.collect(1, 0.05)
            assert (dst[0] == 7).all()
            cluster.engines[1].abort()


def test_one_member_fewer_in_the_next_epoch() -> None:
    rng = np.random.default_rng(11)
    with Cluster(3) as cluster:
        cluster.start()
        epoch = cluster.start([0, 2])
        sources = [random_array(rng, 50_000, "float64") for _ in range(2)]
        results = [np.zeros(50_000, np.float64) for _ in range(2)]
        for slot, i in enumerate([0, 2]):
            cluster.submit(i, epoch, 5, 0, sources[slot], results[slot], "float64")
        for i in (0, 2):
            cluster.reduced(i, epoch, 5, 0)
        assert {r.tobytes() for r in results} == {ring_sum(sources, "float64").tobytes()}


def test_an_epoch_prepared_in_the_background_does_not_disturb_the_running_one() -> None:
    rng = np.random.default_rng(12)
    with Cluster(3) as cluster:
        running = cluster.start([0, 1])
        joined = new_epoch()
        cluster.prepare(joined, [0, 1, 2])
        sources = [random_array(rng, 300_000, "float32") for _ in range(3)]
        for step in range(5):
            results = cluster.all_reduce(running, step, 0, sources[:2], "float32")
            assert {r.tobytes() for r in results} == {ring_sum(sources[:2], "float32").tobytes()}
        for i in range(3):
            cluster.wait(i, lambda e: e["type"] == "ready" and e["epoch"] == joined)
        cluster.activate(joined, range(3))
        results = cluster.all_reduce(joined, 5, 0, sources, "float32")
        assert {r.tobytes() for r in results} == {ring_sum(sources, "float32").tobytes()}


def test_a_member_that_hears_of_the_epoch_late_is_waited_for() -> None:
    with Cluster(2) as cluster:
        epoch = new_epoch()
        members = [cluster.member(0), cluster.member(1)]
        cluster.engines[0].prepare(epoch, members, 0)
        cluster.engines[0].activate(epoch)
        src = np.arange(1000, dtype=np.float32)
        dst = [np.zeros(1000, np.float32) for _ in range(2)]
        cluster.submit(0, epoch, 1, 0, src, dst[0], "float32")
        cluster.collect(0, 0.3)
        assert set(cluster.types(0)) <= {"rail"}
        cluster.engines[1].prepare(epoch, members, 1)
        cluster.engines[1].activate(epoch)
        cluster.submit(1, epoch, 1, 0, src, dst[1], "float32")
        for i in range(2):
            cluster.reduced(i, epoch, 1, 0)
            assert (dst[i] == 2 * src).all()


def test_a_discarded_epoch_is_refused_not_joined() -> None:
    with Cluster(2) as cluster:
        epoch = new_epoch()
        cluster.engines[1].discard(epoch)
        cluster.engines[0].prepare(epoch, [cluster.member(0), cluster.member(1)], 0)
        cluster.collect(0, 0.3)
        reasons = {link["reason"] for link in cluster.links(0) if link["direction"] == "out"}
        assert all(reason.startswith("refused: this epoch is over here") for reason in reasons), reasons
        assert "ready" not in cluster.types(0)


def test_members_with_different_plans_are_told_so() -> None:
    with Cluster(2) as cluster:
        epoch = cluster.start()
        buffers = [np.zeros(5000 + i, np.float32) for i in range(2)]
        results = [np.zeros_like(b) for b in buffers]
        for i in range(2):
            cluster.submit(i, epoch, 1, 0, buffers[i], results[i], "float32")
        failures = [cluster.wait(i, lambda e: e["type"] == "failed") for i in range(2)]
        assert any("has another size at" in f["reason"] for f in failures)


def test_submissions_that_cannot_be_are_refused_with_a_reason() -> None:
    with Cluster(1) as cluster:
        engine, epoch = cluster.engines[0], cluster.start()
        a = np.zeros(16, np.float32)
        with pytest.raises(ValueError, match="overlap"):
            engine.submit(epoch, 1, 0, a.ctypes.data, a.ctypes.data + 4, 8, 0)
        with pytest.raises(ValueError, match="DTYPES"):
            engine.submit(epoch, 1, 0, a.ctypes.data, a.ctypes.data + 32, 8, 9)
        with pytest.raises(ValueError, match="address 0"):
            engine.submit(epoch, 1, 0, 0, a.ctypes.data, 8, 0)
        with pytest.raises(ValueError, match="16 bytes"):
            engine.submit(b"short", 1, 0, a.ctypes.data, a.ctypes.data + 32, 8, 0)
        with pytest.raises(ValueError, match="never prepared"):
            engine.activate(new_epoch())
        with pytest.raises(ValueError, match="this engine is r0"):
            engine.prepare(new_epoch(), [{"name": "x", "incarnation": 1, "rails": engine.endpoints()}], 0)
        with pytest.raises(ValueError, match="incarnation 9"):
            engine.prepare(new_epoch(), [{"name": "r0", "incarnation": 9, "rails": engine.endpoints()}], 0)
        engine.submit(new_epoch(), 1, 0, a.ctypes.data, a.ctypes.data + 32, 8, 0)  # another epoch: ignored
        assert "reduced" not in cluster.types(0)
        engine.close()
        with pytest.raises(ValueError, match="closed"):
            engine.activate(epoch)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"heartbeat_ms": 0}, "heartbeat_ms is 0"),
        ({"chunk_bytes": 100}, "multiple of 8"),
        ({"chunk_bytes": 1 << 20, "window_bytes": 1 << 10}, "window_bytes is less"),
        ({"hold_down_ms": 100, "hold_down_max_ms": 10}, "hold_down_max_ms"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Cluster(1, **settings)


@pytest.mark.parametrize(
    ("rail", "match"),
    [
        (("x", "nosuch0", "127.0.0.1"), "no network device nosuch0"),
        (("x", "lo", "192.0.2.7"), "lo does not have this address"),
        (("x", "", "192.0.2.7"), "does not have the address"),
        (("x", "", "localhost"), "not a numeric"),
        (("", "", "127.0.0.1"), "name"),
    ],
)
def test_rails_that_do_not_exist_are_named(rail: tuple[str, str, str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        core.Engine("job", b"t", "r0", 1, [rail], core.Options())


def test_ipv6_and_a_device() -> None:
    rails = [("rail0", "lo", "::1"), ("rail1", "lo", "127.0.0.1")]
    with Cluster(2, rails=rails) as cluster:
        epoch = cluster.start()
        sources = [np.arange(5000, dtype=np.int32) for _ in range(2)]
        for result in cluster.all_reduce(epoch, 1, 0, sources, "int32"):
            assert (result == 2 * sources[0]).all()


def test_one_rail_is_enough() -> None:
    with Cluster(3, rails=[("lo", "", "127.0.0.1")]) as cluster:
        epoch = cluster.start()
        sources = [np.arange(50_000, dtype=np.float32) for _ in range(3)]
        for result in cluster.all_reduce(epoch, 1, 0, sources, "float32"):
            assert (result == 3 * sources[0]).all()


def test_a_peer_that_closes_is_reported_and_what_waits_for_it_fails() -> None:
    with Cluster(3) as cluster:
        epoch = cluster.start()
        src, dst = np.ones(100_000, np.float32), np.zeros(100_000, np.float32)
        cluster.submit(0, epoch, 1, 0, src, dst, "float32")
        cluster.engines[1].close()
        gone: list[Event] = [cluster.wait(i, lambda e: e["type"] == "peer_gone") for i in (0, 2)]
        assert {e["peer"] for e in gone} == {"r1"}
        failed = cluster.wait(0, lambda e: e["type"] == "failed")
        assert "r1" in failed["reason"]
        dst[:] = 3  # ours again
        later = np.zeros(100_000, np.float32)
        cluster.submit(0, epoch, 1, 1, src, later, "float32")
        cluster.wait(0, lambda e: e["type"] == "failed" and e["bucket"] == 1)
