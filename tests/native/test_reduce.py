"""`reduce`: the thread that waits carries the bytes itself; the result and every ending are the same as with events."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ftar_core.native import core

from .cluster import Array, Cluster, new_epoch, random_array, ring_sum

if TYPE_CHECKING:
    from ftar_core.native._core import Event

# Around the limits between which ways of sending and of adding change.
SIZES = [0, 1, 2_047, 2_049, 16_384, 32_768, 32_769, 100_003, 700_001]


def reduce(
    cluster: Cluster, i: int, epoch: bytes, step: int, bucket: int, src: Array, dst: Array, timeout_s: float = 60
) -> Event | None:
    return cluster.engines[i].reduce(
        epoch, step, bucket, src.ctypes.data, dst.ctypes.data, src.size, core.DTYPES["float32"], int(timeout_s * 1000)
    )


@pytest.mark.parametrize("members", [1, 2, 3])
def test_it_gives_the_bits_of_the_dumb_loop_and_queues_no_event(members: int) -> None:
    rng = np.random.default_rng(members)
    with Cluster(members) as cluster, ThreadPoolExecutor(members) as pool:
        epoch = cluster.start()
        for step, size in enumerate(SIZES):
            sources = [random_array(rng, size, "float32") for _ in range(members)]
            results = [np.zeros_like(s) for s in sources]
            futures = [pool.submit(reduce, cluster, i, epoch, step, 0, sources[i], results[i]) for i in range(members)]
            for future in futures:
                event = future.result()
                assert event is not None
                assert (event["type"], event["step"]) == ("reduced", step)
            wanted = ring_sum(sources, "float32").tobytes()
            assert [r.tobytes() for r in results] == [wanted] * members, size
        assert all("reduced" not in cluster.types(i) for i in range(members))


def test_two_threads_of_a_process_wait_at_once() -> None:
    rng = np.random.default_rng(4)
    sources = [[random_array(rng, 200_000, "float32") for _ in range(2)] for _ in range(6)]
    results = [[np.zeros_like(s) for s in pair] for pair in sources]
    with Cluster(2) as cluster, ThreadPoolExecutor(12) as pool:
        epoch = cluster.start()
        futures: list[Future[Event | None]] = [
            pool.submit(reduce, cluster, i, epoch, 1, b, sources[b][i], results[b][i]) for b in range(6) for i in (0, 1)
        ]
        events = [f.result() for f in futures]
        assert [e and e["type"] for e in events] == ["reduced"] * 12
        for b in range(6):
            assert {r.tobytes() for r in results[b]} == {ring_sum(sources[b], "float32").tobytes()}


def test_a_wait_that_ends_too_early_leaves_the_operation_and_its_event() -> None:
    src, dst, other = np.ones(50_000, np.float32), np.zeros(50_000, np.float32), np.zeros(50_000, np.float32)
    with Cluster(2) as cluster:
        epoch = cluster.start()
        assert reduce(cluster, 0, epoch, 1, 0, src, dst, 0.05) is None
        cluster.submit(1, epoch, 1, 0, src, other, "float32")
        cluster.reduced(0, epoch, 1, 0)
        cluster.reduced(1, epoch, 1, 0)
        assert (dst == 2).all()
        assert (other == 2).all()


@pytest.mark.parametrize("how", ["abort", "close", "activate", "peer"])
def test_a_wait_ends_with_the_reason_when_its_epoch_does(how: str) -> None:
    src, dst = np.ones(5_000, np.float32), np.zeros(5_000, np.float32)
    with Cluster(2) as cluster, ThreadPoolExecutor(1) as pool:
        epoch, other = cluster.start(), new_epoch()
        waiting = pool.submit(reduce, cluster, 0, epoch, 1, 0, src, dst)
        time.sleep(0.1)
        assert not waiting.done()
        if how == "activate":
            cluster.prepare(other, [0, 1])
            cluster.engines[0].activate(other)
        elif how == "peer":
            cluster.engines[1].close()
        else:
            getattr(cluster.engines[0], how)()
        event = waiting.result(60)
        assert event is not None
        assert event["type"] == "failed"
        reasons = {"abort": "left", "close": "closed", "activate": "left", "peer": "r1"}
        assert reasons[how] in event["reason"]


def test_an_epoch_that_is_not_active_fails_at_once() -> None:
    src, dst = np.ones(8, np.float32), np.zeros(8, np.float32)
    with Cluster(1) as cluster:
        cluster.start()
        event = reduce(cluster, 0, new_epoch(), 1, 0, src, dst)
        assert event is not None
        assert (event["type"], event["reason"]) == ("failed", "this epoch is not the active one")
        with pytest.raises(ValueError, match="16 bytes"):
            reduce(cluster, 0, b"short", 1, 0, src, dst)


def test_events_keep_coming_to_whoever_does_not_wait() -> None:
    """After waits, the I/O thread has its connections back."""
    src = np.ones(50_000, np.float32)
    with Cluster(2) as cluster:
        epoch = cluster.start()
        for step in range(5):
            results = [np.zeros_like(src) for _ in range(2)]
            thread = threading.Thread(target=reduce, args=(cluster, 1, epoch, 2 * step, 0, src, results[1]))
            thread.start()
            assert reduce(cluster, 0, epoch, 2 * step, 0, src, results[0])
            thread.join()
            assert {r.tobytes() for r in cluster.all_reduce(epoch, 2 * step + 1, 0, [src, src], "float32")} == {
                (2 * src).tobytes()
            }
