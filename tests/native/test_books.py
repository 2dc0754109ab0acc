"""The books of a link's two ends against random cuts: this file is the wire between them, byte by byte.

Connections are cut at any byte, in either direction, while questions and answers are on their way; places are known
late and out of order; any connection takes any fragment. Every byte of every message must land once, in order, and
never after the message was handed out."""

from __future__ import annotations

import ctypes
import random
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ftar_core.native import core

if TYPE_CHECKING:
    from ftar_core.native._core import Frame

HEADER = 64  # bytes on the wire of every frame


@dataclass
class Sent:
    """A frame on its way: `left` bytes of it have not arrived."""

    kind: str
    words: tuple[int, ...] = ()
    frame: Frame | None = None
    left: int = HEADER


@dataclass
class Connection:
    """Two directions in order. Each end may find it dead before the other does; bytes under way are lost with it."""

    to_receiver: deque[Sent] = field(default_factory=deque)
    to_sender: deque[Sent] = field(default_factory=deque)
    into: int | None = None  # where the present data frame's bytes go
    at_sender: bool = True
    at_receiver: bool = True


class World:
    def __init__(self, seed: int, rails: int, stripe: bool, unposted: int = 1 << 30) -> None:
        self.dice = random.Random(seed)
        self.rails, self.stripe = rails, stripe
        self.window = self.dice.choice([300, 2_000, 20_000])
        self.count = 120
        sizes = self.dice.choice([[0, 1, 7, 100, 299], [0, 3, 5_000], [40], [1_000, 0, 0, 0, 12_000]])
        rng = np.random.default_rng(seed)
        self.sources = [rng.integers(0, 255, self.dice.choice(sizes), dtype=np.uint8) for _ in range(self.count)]
        self.places = [np.full(s.size + 1, 0xEE, np.uint8) for s in self.sources]
        self.posts = 0.05  # how likely more places are known, each turn
        self.known = 0 if self.dice.random() < 0.5 else self.count  # messages whose place the receiver has
        self.out = core.Outbox(rails, self.window)
        me = weakref.ref(self)  # no circle: the native object could not be collected
        self.inbox = core.Inbox(rails, lambda seq, total: me().place(seq, total), unposted)  # type: ignore[union-attr]
        self.connections: list[Connection | None] = [None] * rails
        self.pushed = self.delivered = self.acked = self.completed = 0
        self.cuts = self.bounced = self.crowded = self.anew = 0

    def place(self, seq: int, total: int) -> int | None:
        assert seq >= self.delivered, "asked about a message that was handed out"
        assert total == self.sources[seq].size
        return self.places[seq].ctypes.data if seq < self.known else None

    # --- the sender's end ---

    def dial(self, rail: int) -> None:
        if self.connections[rail] is not None and self.connections[rail].at_receiver:  # type: ignore[union-attr]
            self.inbox.closed(rail)  # "the peer connected anew"
        made = self.connections[rail] = Connection()
        generation = self.out.opened(rail)
        made.to_receiver.append(Sent("open", (generation, self.out.keep_from(rail))))
        for lost_rail, lost in self.out.questions():
            made.to_receiver.append(Sent("lost", (lost_rail, lost, self.out.keep_from(lost_rail))))

    def lose_at_sender(self, rail: int) -> None:
        conn = self.connections[rail]
        assert conn is not None
        conn.at_sender = False
        if generation := self.out.closed(rail):
            for other in self.connections:
                if other is not None and other.at_sender:
                    other.to_receiver.append(Sent("lost", (rail, generation, self.out.keep_from(rail))))

    def pull(self, rail: int) -> None:
        conn = self.connections[rail]
        if conn is None or not conn.at_sender or len(conn.to_receiver) > 3:
            return
        if not self.stripe and any(c is not None and c.at_sender for c in self.connections[:rail]):
            return
        frame = self.out.next(rail, self.dice.choice([1, 10, 100, 4_000]))
        if frame is not None:
            conn.to_receiver.append(Sent("data", frame=frame, left=HEADER + frame[3]))

    def hear_sender(self, sent: Sent) -> None:
        if sent.kind == "ack":
            self.completed += self.out.acknowledged(sent.words[0])
        else:
            generation, frames, count, seq = sent.words
            self.completed += self.out.acknowledged(seq)
            assert self.out.answered(generation, frames, count) == ""

    # --- the receiver's end ---

    def lose_at_receiver(self, rail: int) -> None:
        conn = self.connections[rail]
        assert conn is not None
        conn.at_receiver, conn.into = False, None
        self.inbox.closed(rail)

    def hear_receiver(self, rail: int, conn: Connection, sent: Sent) -> None:
        if sent.kind == "open":
            if self.inbox.opened(rail, sent.words[0], sent.words[1], self.window):
                self.lose_at_receiver(rail)
        elif sent.kind == "lost":
            lost_rail, generation, keep_from = sent.words
            if self.inbox.generation(lost_rail) == generation:
                self.lose_at_receiver(lost_rail)
            frames, count, seq = self.inbox.lost(lost_rail, generation, keep_from)
            conn.to_sender.append(Sent("have", (generation, frames, count, seq)))

    def carry(self, rail: int) -> None:
        """Some bytes arrive at the receiver."""
        conn = self.connections[rail]
        if conn is None or not conn.at_receiver:
            return
        budget = self.dice.choice([1, 50, 200, 5_000])
        while budget > 0 and conn.to_receiver and conn.at_receiver:
            sent = conn.to_receiver[0]
            if sent.frame is None or conn.into is None:
                size = sent.frame[3] if sent.frame else 0
                step = min(budget, sent.left - size)
                sent.left -= step
                budget -= step
                if sent.left > size:
                    return
                if sent.frame is None:
                    conn.to_receiver.popleft()
                    self.hear_receiver(rail, conn, sent)
                    continue
                into, reason = self.inbox.begins(rail, sent.frame)
                assert reason == ""
                crowded = self.inbox.crowded()
                self.crowded += crowded
                if into is None and not crowded and size > 0 and sent.frame[1] > self.inbox.next_seq():
                    raise AssertionError("a later message must not hold up the connection")
                if into is None and (size > 0 or sent.frame[1] >= self.known):
                    return  # paused
                conn.into = into or 1
                self.bounced += sent.frame[1] >= self.known
                budget = max(budget, 1)
            assert sent.frame is not None
            step = min(budget, sent.left)
            done = sent.frame[3] - sent.left
            if step > 0:
                ctypes.memmove(conn.into + done, sent.frame[5] + done, step)
                self.inbox.arrived(rail, step)
            sent.left -= step
            budget -= step
            if sent.left == 0:
                self.inbox.complete(rail)
                conn.into = None
                conn.to_receiver.popleft()
                self.deliver(conn)

    def deliver(self, conn: Connection | None) -> None:
        begun = self.delivered
        while (seq := self.inbox.next()) is not None:
            assert seq == self.delivered
            place, source = self.places[seq], self.sources[seq]
            assert (place[:-1] == source).all()
            assert place[-1] == 0xEE
            place[:] = 0xEE  # the caller's again: a late byte would show
            self.delivered += 1
        if conn is not None and conn.at_receiver and self.delivered > begun:
            conn.to_sender.append(Sent("ack", (self.delivered,)))
            self.acked = self.delivered

    def acknowledge(self) -> None:
        """Once: an acknowledgement that is lost with its connection is not repeated."""
        for conn in self.connections:
            if self.acked < self.delivered and conn is not None and conn.at_receiver:
                conn.to_sender.append(Sent("ack", (self.delivered,)))
                self.acked = self.delivered

    # --- everything at once ---

    def turn(self, calm: bool) -> None:
        dice = self.dice
        rail = dice.randrange(self.rails)
        conn = self.connections[rail]
        what = dice.random()
        if conn is None or not conn.at_sender:
            if what < 0.2 or calm:
                self.dial(rail)
        elif what < 0.02 and not calm:
            self.cuts += 1
            self.lose_at_sender(rail)
        elif what < 0.04 and not calm and conn.at_receiver:
            self.cuts += 1
            self.lose_at_receiver(rail)
        elif not conn.at_receiver and what < 0.5:
            self.lose_at_sender(rail)  # reset, or "absent"
        elif what < 0.5:
            self.pull(rail)
        elif what < 0.8:
            self.carry(rail)
        elif conn.to_sender:
            self.hear_sender(conn.to_sender.popleft())
        if self.inbox.stuck() and dice.random() < 0.02:  # time passes: the connection is made anew
            for k, waiting in enumerate(self.connections):
                if waiting is not None and waiting.at_receiver and waiting.into is None:
                    self.anew += 1
                    self.lose_at_receiver(k)
        if self.pushed < self.count and dice.random() < 0.3:
            source = self.sources[self.pushed]
            self.out.push(source.ctypes.data, source.size)
            self.pushed += 1
        if self.known < self.count and dice.random() < self.posts:
            self.known += dice.choice([1, 1, 10]) if self.posts > 0.02 else 1
            if self.inbox.waits():
                self.inbox.find_places()
                self.deliver(None)
        assert self.inbox.fault() == ""

    def run(self) -> None:
        for turn in range(200_000):
            self.turn(calm=turn > 12_000)
            if self.completed == self.count:
                break
            if turn % 50 == 0:
                self.acknowledge()
        assert (self.delivered, self.completed) == (self.count, self.count)
        assert not self.inbox.waits()
        assert all((p == 0xEE).all() for p in self.places), "a byte came late"


@pytest.mark.parametrize("stripe", [False, True], ids=["backup", "stripe"])
@pytest.mark.parametrize("rails", [1, 2, 3])
def test_any_cut_at_any_byte_costs_nothing(rails: int, stripe: bool) -> None:
    cuts = bounced = 0
    for seed in range(15):
        world = World(seed * 10 + rails, rails, stripe)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed * 10 + rails}: {error}") from error
        cuts += world.cuts
        bounced += world.bounced
    assert cuts > 500
    if stripe and rails > 1:
        assert bounced > 10  # messages came before their place, and before one that came first


@pytest.mark.parametrize("rails", [1, 2, 3])
def test_a_process_that_may_hold_next_to_nothing_gets_everything_all_the_same(rails: int) -> None:
    """Its user posts one receive after the other, slowly, and connections are cut."""
    crowded = anew = 0
    for seed in range(12):
        world = World(seed * 10 + rails, rails, stripe=True, unposted=1 if seed % 2 else 60)
        world.known, world.posts = 0, 0.015
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed * 10 + rails}: {error}") from error
        crowded += world.crowded
        anew += world.anew
    if rails > 1:
        assert crowded > 100
        assert anew > 10


def test_a_later_message_without_a_place_does_not_hold_up_the_first_one_sent_again() -> None:
    """Message 0 is lost with its connection; message 1, which has no place yet, is under way on the other. If it held
    up that connection, message 0, sent again behind it, would never come."""
    source = np.arange(100, dtype=np.uint8)
    places = [np.zeros(100, np.uint8), np.zeros(100, np.uint8)]
    known = {0}
    out = core.Outbox(2, 1_000)
    inbox = core.Inbox(2, lambda seq, total: places[seq].ctypes.data if seq in known else None)
    for _ in range(2):
        out.push(source.ctypes.data, 100)
    for rail in (0, 1):
        assert inbox.opened(rail, out.opened(rail), 0, 1_000) == ""
    assert out.next(0, 1_000) is not None  # message 0: on its way on rail 0
    assert out.closed(0) == 1

    def arrives(rail: int) -> None:
        frame = out.next(rail, 1_000)
        assert frame is not None
        into, reason = inbox.begins(rail, frame)
        assert (into is not None, reason) == (True, "")
        ctypes.memmove(into, frame[5], frame[3])
        inbox.arrived(rail, frame[3])
        inbox.complete(rail)

    arrives(1)  # message 1
    assert inbox.waits()
    inbox.closed(0)
    assert inbox.lost(0, 1, 1) == (0, 0, 0)
    assert out.answered(1, 0, 0) == ""
    arrives(1)  # message 0
    assert inbox.next() == 0
    assert inbox.next() is None
    known.add(1)
    inbox.find_places()
    assert inbox.next() == 1
    assert all((p == source).all() for p in places)
    assert out.acknowledged(2) == 2


def test_questions_and_answers_may_be_lost_too() -> None:
    """Three connections in a row die: the first with half of a message on it, the second with the question, the third
    with the answer. The fourth hears everything that is not answered yet, and brings exactly the other half."""
    source = np.arange(100, dtype=np.uint8)
    place = np.zeros(100, np.uint8)
    out = core.Outbox(1, 1_000)
    inbox = core.Inbox(1, lambda seq, total: place.ctypes.data)
    out.push(source.ctypes.data, 100)
    assert inbox.opened(0, out.opened(0), out.keep_from(0), 1_000) == ""
    frame = out.next(0, 1_000)
    assert frame is not None
    into, _ = inbox.begins(0, frame)
    assert into is not None
    ctypes.memmove(into, frame[5], 50)
    inbox.arrived(0, 50)
    inbox.closed(0)
    assert out.closed(0) == 1
    second = out.opened(0)
    assert out.questions() == [(0, 1)]
    assert out.closed(0) == second, "something is in flight: ask about this one too"
    assert inbox.lost(0, second, out.keep_from(0)) == (0, 0, 0)
    third = out.opened(0)
    assert inbox.opened(0, third, out.keep_from(0), 1_000) == ""
    assert inbox.lost(0, 1, out.keep_from(0)) == (0, 50, 0)  # lost with its connection
    inbox.closed(0)
    assert out.closed(0) == third
    assert inbox.opened(0, out.opened(0), out.keep_from(0), 1_000) == ""
    assert out.next(0, 1_000) is None, "what may have arrived is not sent again before the answer"
    for rail, generation in out.questions():
        frames, count, _ = inbox.lost(rail, generation, out.keep_from(rail))
        assert out.answered(generation, frames, count) == ""
        assert out.answered(generation, 7, 7) == "", "an answer that came already is no news"
    frame = out.next(0, 1_000)
    assert frame is not None
    assert frame[1:5] == (0, 50, 50, 100)
    into, _ = inbox.begins(0, frame)
    assert into == place.ctypes.data + 50
    ctypes.memmove(into, frame[5], 50)
    inbox.arrived(0, 50)
    inbox.complete(0)
    assert inbox.next() == 0
    assert (place == source).all()


def test_what_is_remembered_of_lost_connections_is_bounded() -> None:
    inbox = core.Inbox(1, lambda seq, total: None)
    for generation in range(1, 1_000):  # a sender that asks: everything before is forgotten
        assert inbox.opened(0, generation, generation, 1_000) == ""
        inbox.closed(0)
    assert inbox.fault() == ""
    for generation in range(1_000, 1_300):  # and one that never does
        inbox.opened(0, generation, 1_000, 1_000)
        inbox.closed(0)
    assert "too many connections" in inbox.fault()


def test_beyond_its_bound_a_process_holds_nothing_more() -> None:
    """Two messages come before their places and before message 0. The second finds no room: its connection waits, until
    the first has its place. What the user waits for may be behind it: then it is time to connect anew."""
    source = np.arange(100, dtype=np.uint8)
    places = [np.zeros(100, np.uint8) for _ in range(3)]
    known = {0}
    inbox = core.Inbox(2, lambda seq, total: places[seq].ctypes.data if seq in known else None, 150)
    for rail in (0, 1):
        assert inbox.opened(rail, rail + 1, 0, 1_000) == ""

    def begins(rail: int, seq: int) -> bool:
        into, reason = inbox.begins(rail, (rail + 1, seq, 0, 100, 100, 0))
        assert reason == ""
        if into is not None:
            ctypes.memmove(into, source.ctypes.data, 100)
            inbox.arrived(rail, 100)
            inbox.complete(rail)
        return into is not None

    assert begins(0, 1)
    assert not inbox.crowded()
    assert not begins(0, 2)
    assert (inbox.crowded(), inbox.room(), inbox.stuck()) == (True, False, True)
    assert begins(1, 0), "it comes on the other connection"
    assert (inbox.crowded(), inbox.stuck()) == (True, False)
    assert inbox.next() == 0
    known.add(1)
    inbox.find_places()
    assert inbox.next() == 1
    assert inbox.room(), "what was held is given back"
    assert not begins(0, 2), "it is the first one now: the user posts it or has to wait"
    assert not inbox.crowded()
    known.add(2)
    assert begins(0, 2)
    assert inbox.next() == 2
    assert all((p == source).all() for p in places)


def test_a_fragment_larger_than_the_bound_finds_room_when_nothing_else_is_held() -> None:
    inbox = core.Inbox(1, lambda seq, total: None, 64)
    assert inbox.opened(0, 1, 0, 10_000) == ""
    assert inbox.begins(0, (1, 1, 0, 5_000, 5_000, 0))[0] is not None
    inbox.arrived(0, 5_000)
    inbox.complete(0)
    assert inbox.begins(0, (1, 2, 0, 1, 1, 0)) == (None, "")
    assert inbox.crowded()


def test_a_window_that_no_sender_can_have_is_refused() -> None:
    inbox = core.Inbox(1, lambda seq, total: None)
    for window in (0, 63, (1 << 30) + 1, 1 << 63):
        assert "64 bytes to 1 GiB" in inbox.opened(0, 1, 0, window)
    assert inbox.opened(0, 1, 0, 1 << 30) == ""


def test_a_message_whose_connection_ends_with_its_last_byte_is_handed_out() -> None:
    byte = np.zeros(10, np.uint8)
    inbox = core.Inbox(1, lambda seq, total: byte.ctypes.data)
    assert inbox.opened(0, 1, 0, 1_000) == ""
    assert inbox.begins(0, (1, 0, 0, 10, 10, 0))[0] is not None
    inbox.arrived(0, 10)
    inbox.closed(0)
    assert inbox.next() == 0
    assert inbox.lost(0, 1, 1) == (1, 0, 1)


def test_what_cannot_be_is_named() -> None:
    byte = np.zeros(10, np.uint8)
    out = core.Outbox(1, 1_000)
    inbox = core.Inbox(1, lambda seq, total: byte.ctypes.data)
    out.push(byte.ctypes.data, 10)
    assert out.opened(0) == 1
    assert "another generation" in inbox.begins(0, (1, 0, 0, 10, 10, 0))[1]
    assert inbox.opened(0, 1, 0, 1_000) == ""
    assert "twice" in inbox.opened(0, 1, 0, 1_000)
    assert "another generation" in inbox.begins(0, (2, 0, 0, 10, 10, 0))[1]
    assert inbox.begins(0, (1, 0, 0, 6, 10, 0)) == (byte.ctypes.data, "")
    inbox.arrived(0, 6)
    inbox.complete(0)
    assert "more bytes" in inbox.begins(0, (1, 0, 5, 5, 10, 0))[1]
    assert "more bytes" in inbox.fault()
    assert "too far ahead" in inbox.begins(0, (1, 1 << 40, 0, 1, 1, 0))[1]
    assert "its length" in inbox.begins(0, (1, 0, 6, 4, 11, 0))[1]
    inbox.closed(0)
    assert inbox.lost(0, 1, 1) == (1, 0, 0)
    assert "gave up" in inbox.opened(0, 1, 0, 1_000)
    assert out.next(0, 6) is not None
    assert out.closed(0) == 1
    assert out.questions() == [(0, 1)]
    assert "never sent" in out.answered(1, 2, 0)
