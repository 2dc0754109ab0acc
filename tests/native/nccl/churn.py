"""Connections that come and go while a storm blows: closed early, closed with requests in flight, never accepted, made
twice from one handle. Whatever was promised is kept: who ends in good order has every byte, who loses the other end
hears of it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import PATIENCE
from .abi import REMOTE
from .rig import Peer
from .streams import MEGA

SIZES = [0, 8, 4096, 70_000, MEGA]
WAIT_S = 60.0
FIRST_STREAM = 1000  # the storm's lasting streams have smaller numbers


@dataclass(frozen=True)
class Visit:
    what: str
    sender: int
    here: int  # device of the sender
    there: int
    pause_ms: int  # before the unfriendly act, or between two visits
    count: int


def plan(dice: random.Random, visits: int, rails: int) -> list[Visit]:
    kinds = ["good order", "sender leaves", "receiver leaves", "never accepted", "aborted", "copied handle"]
    order = [kind for _ in range(visits // len(kinds) + 1) for kind in dice.sample(kinds, len(kinds))]
    return [
        Visit(
            what,
            dice.randrange(2),
            dice.randrange(rails),
            dice.randrange(rails),
            dice.choice([0, 1, 5, 20, 60, 150]),
            dice.randrange(1, 40),
        )
        for what in order[:visits]
    ]


class Churn(threading.Thread):
    """Carries out the visits one after the other, again from the first when all are done, until it is told to stop."""

    def __init__(self, peers: list[Peer], visits: list[Visit]) -> None:
        super().__init__(daemon=True)
        self.peers, self.visits = peers, visits
        self.stopping = threading.Event()
        self.done = 0
        self.bytes = 0
        self.error: BaseException | None = None
        self.now = ""

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                visit = self.visits[self.done % len(self.visits)]
                self.now = f"visit {self.done}: {visit}"
                _ACTS[visit.what](self, visit)
                self.done += 1
                self.stopping.wait(visit.pause_ms / 1e3)
        except BaseException as error:
            self.error = error

    def ask(self, peer: int, do: str, **more: Any) -> Any:
        return self.peers[peer].ask(do, **more)

    def until(self, attempt: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + WAIT_S * PATIENCE
        while (value := attempt()) in (None, 0, False):
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.now}: not within {WAIT_S:.0f} s: {what}")
            time.sleep(0.01)
        return value

    def connection(self, v: Visit) -> tuple[int, int]:
        listener, handle = self.ask(1 - v.sender, "listen", device=v.there)
        send = self.ask(v.sender, "connect", device=v.here, handle=handle)
        receive = self.until(lambda: self.ask(1 - v.sender, "accept", listener=listener), "accept")
        self.ask(1 - v.sender, "close", kind="listen", comm=listener)
        return send, receive

    def stream(self, v: Visit, comms: tuple[int, int], name: str, count: int) -> None:
        about = {"stream": FIRST_STREAM + self.done, "sizes": SIZES, "count": count, "window": 6, "name": name}
        self.ask(1 - v.sender, "receive", comm=comms[1], **about)
        self.ask(v.sender, "send", comm=comms[0], **about)

    def ended(self, peer: int, name: str, allowed: set[int]) -> dict[str, Any]:
        def gone() -> dict[str, Any] | None:
            state: dict[str, Any] = self.ask(peer, "state-of", name=name)
            return None if state["alive"] else state

        state = self.until(gone, f"{name} of peer {peer} ends")
        if state["code"] not in allowed:
            raise AssertionError(f"{self.now}: {name} of peer {peer}: {state['error']}")
        self.bytes += state["bytes"]
        return state  # type: ignore[no-any-return]

    def close(self, v: Visit, comms: tuple[int, int], sender_first: bool = True) -> None:
        ends = [(v.sender, "send", comms[0]), (1 - v.sender, "receive", comms[1])]
        for peer, kind, comm in ends if sender_first else reversed(ends):
            self.ask(peer, "close", kind=kind, comm=comm)

    def good_order(self, v: Visit) -> None:
        comms = self.connection(v)
        self.stream(v, comms, "good", v.count)
        for peer in (0, 1):
            state = self.ended(peer, "good", {0})
            assert state["done"] == v.count, f"{self.now}: {state['done']} of {v.count} messages at peer {peer}"
        self.close(v, comms, sender_first=v.count % 2 == 0)

    def sender_leaves(self, v: Visit) -> None:
        """It deregisters its memory and closes while its messages are in flight."""
        comms = self.connection(v)
        self.stream(v, comms, "left", 1 << 40)
        time.sleep(v.pause_ms / 1e3)
        self.ask(v.sender, "halt", name="left", abandon=True)
        self.ended(v.sender, "left", {0})
        self.ask(v.sender, "close", kind="send", comm=comms[0])
        self.ended(1 - v.sender, "left", {REMOTE})
        self.ask(1 - v.sender, "close", kind="receive", comm=comms[1])

    def receiver_leaves(self, v: Visit) -> None:
        comms = self.connection(v)
        self.stream(v, comms, "left", 1 << 40)
        time.sleep(v.pause_ms / 1e3)
        self.ask(1 - v.sender, "halt", name="left", abandon=True)
        self.ended(1 - v.sender, "left", {0})
        self.ask(1 - v.sender, "close", kind="receive", comm=comms[1])
        self.ended(v.sender, "left", {REMOTE})
        self.ask(v.sender, "close", kind="send", comm=comms[0])

    def never_accepted(self, v: Visit) -> None:
        """The listener goes; whoever wanted to connect gets an error, at the latest when it is given up."""
        listener, handle = self.ask(1 - v.sender, "listen", device=v.there)
        send = self.ask(v.sender, "connect", device=v.here, handle=handle)
        time.sleep(v.pause_ms / 1e3)
        self.ask(1 - v.sender, "close", kind="listen", comm=listener)
        if v.count % 4 == 0:  # it takes its time to find out: not each time
            about = {"stream": FIRST_STREAM + self.done, "sizes": [8], "count": 1, "window": 1, "name": "alone"}
            self.ask(v.sender, "send", comm=send, **about)
            self.ended(v.sender, "alone", {REMOTE})
        self.ask(v.sender, "close", kind="send", comm=send)

    def aborted(self, v: Visit) -> None:
        listener, handle = self.ask(1 - v.sender, "listen", device=v.there)
        sends = [self.ask(v.sender, "connect", device=v.here, handle=handle) for _ in range(3)]
        for send in sends:
            self.ask(v.sender, "close", kind="send", comm=send)
            time.sleep(v.pause_ms / 3e3)
        receive = self.ask(1 - v.sender, "accept", listener=listener)  # one that was whole for a moment
        self.ask(1 - v.sender, "close", kind="listen", comm=listener)
        if receive:
            self.ask(1 - v.sender, "close", kind="receive", comm=receive)

    def copied_handle(self, v: Visit) -> None:
        """Two connections from one handle; only the first message says which is which."""
        listener, handle = self.ask(1 - v.sender, "listen", device=v.there)
        sends = [self.ask(v.sender, "connect", device=device, handle=handle) for device in (v.here, v.there)]
        receives = []
        for _ in sends:
            receives.append(self.until(lambda: self.ask(1 - v.sender, "accept", listener=listener), "accept"))
        self.ask(1 - v.sender, "close", kind="listen", comm=listener)
        for number, send in enumerate(sends):
            self.ask(v.sender, "say", comm=send, number=number + 1)
        for receive in receives:
            self.ask(1 - v.sender, "listen-for", comm=receive)
        heard = [self.until(lambda r=r: self.ask(1 - v.sender, "word", comm=r), "the first message") for r in receives]  # type: ignore[misc]
        if sorted(heard) != [1, 2]:
            raise AssertionError(f"{self.now}: heard {heard}")
        pairs = [(sends[number - 1], receive) for number, receive in zip(heard, receives, strict=True)]
        for send, _ in pairs:
            self.until(lambda s=send: self.ask(v.sender, "word", comm=s), "the first message is sent")  # type: ignore[misc]
        for k, pair in enumerate(pairs):
            self.stream(v, pair, f"copy{k}", v.count)
        for k, pair in enumerate(pairs):
            for peer in (0, 1):
                state = self.ended(peer, f"copy{k}", {0})
                assert state["done"] == v.count, f"{self.now}: {state['done']} of {v.count} messages at peer {peer}"
            self.close(v, pair)


_ACTS: dict[str, Callable[[Churn, Visit], None]] = {
    "good order": Churn.good_order,
    "sender leaves": Churn.sender_leaves,
    "receiver leaves": Churn.receiver_leaves,
    "never accepted": Churn.never_accepted,
    "aborted": Churn.aborted,
    "copied handle": Churn.copied_handle,
}
