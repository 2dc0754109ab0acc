"""The books of a fetch, and its limit: nothing here owns a socket or a clock."""

from __future__ import annotations

import random

import pytest

from ftar_core.training.pace import BURST_S, DEBT_S, Pace
from ftar_core.training.pieces import LEAST_AHEAD, MOST_AHEAD, Layout, PieceBook, ahead, whole_digest

# --- the row


def test_any_range_of_the_row_is_found_in_the_tensors() -> None:
    sizes = [5, 0, 1, 17, 0, 3]
    memories = [memoryview(bytearray(range(10 * n, 10 * n + size))) for n, size in enumerate(sizes)]
    row = b"".join(bytes(memory) for memory in memories)
    layout = Layout(sizes)
    assert layout.total == len(row)
    for start in range(len(row)):
        for end in range(start, len(row) + 1):
            buffers = layout.buffers(memories, start, end)
            assert b"".join(bytes(buffer) for buffer in buffers) == row[start:end]
            assert all(len(buffer) for buffer in buffers)


# --- the book


def test_every_piece_is_asked_for_once_and_all_of_them_make_the_whole() -> None:
    book = PieceBook(1050, 100)
    asked = []
    while (piece := book.take("r0")) is not None:
        asked.append((piece.start, piece.end))
        assert not book.complete
        book.verified(piece.number, "r0", piece.number)
    assert asked == [(start, min(1050, start + 100)) for start in range(0, 1050, 100)]
    assert book.complete
    assert book.by_source == {"r0": 1050}
    assert book.digest() == whole_digest(range(11))


def test_a_state_without_a_byte_is_complete() -> None:
    book = PieceBook(0, 100)
    assert book.complete
    assert book.take("r0") is None


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_or_damaged_every_piece_arrives(seed: int) -> None:
    chance = random.Random(seed)
    book = PieceBook(chance.randrange(1, 5000), 64)
    sources = ["r0", "r1", "r2"]
    on_the_way: dict[str, list[int]] = {name: [] for name in sources}
    arrived: set[int] = set()
    for _ in range(100_000):
        if book.complete:
            break
        name = chance.choice(sources)
        what = chance.random()
        if what < 0.5 and (piece := book.take(name)) is not None:
            assert piece.number not in arrived
            assert all(piece.number not in numbers for numbers in on_the_way.values())
            on_the_way[name].append(piece.number)
        elif what < 0.9 and on_the_way[name]:
            number = on_the_way[name].pop(0)
            if chance.random() < 0.1:
                book.spoiled(number)
            else:
                book.verified(number, name, number)
                arrived.add(number)
        elif what > 0.97:
            assert book.lost(name) == len(on_the_way[name])
            on_the_way[name].clear()
    assert book.complete
    assert sum(book.by_source.values()) == book.total == book.arrived_bytes


def test_a_slow_source_is_asked_for_little_ahead() -> None:
    assert ahead(0.0) == LEAST_AHEAD
    assert ahead(1e3) == LEAST_AHEAD
    assert ahead(8 * 4e6) == 7
    assert ahead(1e12) == MOST_AHEAD


# --- the limit


def test_a_limit_is_kept_over_any_time() -> None:
    pace, now, sent = Pace(1000.0), 50.0, []
    for _ in range(200):
        now += pace.reserve(now, 100)
        sent.append(now)
    assert sent[-1] - sent[0] == pytest.approx(199 * 0.1, abs=BURST_S + 0.1)
    # an idle hour is no credit
    now += 3600
    burst = [pace.reserve(now, 100) for _ in range(5)]
    assert burst[0] == 0.0
    assert burst[4] == pytest.approx(0.4 - BURST_S)


def test_connections_share_a_limit_evenly() -> None:
    """Each waits for its turn before it asks for the next: a queue, first come first served."""
    pace = Pace(1000.0)
    ready = dict.fromkeys(("r7", "r8", "r9"), 0.0)
    got = dict.fromkeys(ready, 0)
    while min(ready.values()) < 60:
        name = min(ready, key=lambda n: ready[n])
        ready[name] += pace.reserve(ready[name], 100)
        got[name] += 1
    assert max(got.values()) - min(got.values()) <= 2
    assert sum(got.values()) == pytest.approx(600, abs=5)


def test_no_limit_never_waits() -> None:
    assert Pace().reserve(1.0, 1 << 40) == 0.0


def test_the_stream_goes_first_but_cannot_stop_a_fetch_for_good() -> None:
    pace = Pace(1000.0)
    pace.charge(10.0, 300)
    assert pace.reserve(10.0, 100) == pytest.approx(0.3 - BURST_S)
    for _ in range(100):
        pace.charge(20.0, 10_000)
    assert pace.reserve(20.0, 100) == pytest.approx(DEBT_S)
