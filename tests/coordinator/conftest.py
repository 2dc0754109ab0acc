"""A coordinator service in a thread around any machine, and raw clients that speak to it by hand."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftar_core.coordinator.events import EventLog
from ftar_core.coordinator.listen import listen
from ftar_core.coordinator.peers import Tokens
from ftar_core.coordinator.service import CoordinatorMachine, Service
from ftar_core.coordinator.store import FileStore
from ftar_core.protocol.effects import CoordinatorEffect
from ftar_core.protocol.events import CoordinatorEvent
from ftar_core.protocol.record import Claim
from ftar_core.wire.address import Address
from ftar_core.wire.codec import FRAME_LIMIT, FrameParser, encode, from_coordinator, nonce, prove
from ftar_core.wire.messages import Challenge, FromCoordinator, Hello, JobView, Knock, Message, RankInfo, Report

TOKEN, OPERATOR = b"the token of the job", b"the token of operators"
JOB = "demo"


class Running:
    """A service, its store, and the thread it runs in."""

    def __init__(self, directory: Path, make: Callable[[Claim], CoordinatorMachine], port: int = 0) -> None:
        sockets = listen(Address("127.0.0.1", port))
        self.store = FileStore(directory, JOB)
        self.claim = self.store.claim()
        self.events = EventLog(directory / "events.jsonl")
        self.machine = make(self.claim)
        self.service = Service(
            self.machine,
            JOB,
            self.claim.term,
            Tokens(TOKEN, OPERATOR),
            store=self.store,
            events=self.events,
            sockets=sockets,
        )
        self.port = self.service.port
        self.result: tuple[int, str] | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.result = self.service.run()

    def wait(self, timeout_s: float = 60.0) -> tuple[int, str]:
        self.thread.join(timeout_s)
        assert self.result is not None, "the service still runs, or died"
        return self.result

    def stop(self) -> None:
        self.service.stop(75, "end of the test")
        self.thread.join(60)
        self.events.close()
        assert not self.thread.is_alive()


class Client:
    """A peer by hand."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.parser: FrameParser[FromCoordinator] = FrameParser(from_coordinator, FRAME_LIMIT)
        self.waiting: list[FromCoordinator] = []

    def send(self, message: Message) -> None:
        self.sock.sendall(encode(message))

    def next(self) -> FromCoordinator:
        while not self.waiting:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError
            self.waiting += self.parser.feed(data)
        return self.waiting.pop(0)

    def hello(self, replica: str = "r0", token: bytes = TOKEN, knock: bytes | None = None, **changes: Any) -> None:
        """`knock`: the token with which a long hello is announced."""
        challenge = self.next()
        assert isinstance(challenge, Challenge)
        self.my_nonce = nonce()
        if knock is not None:
            self.send(Knock(job=JOB, proof=prove(knock, "member-knock", JOB, challenge.nonce)))
        ranks = (RankInfo(rank=0, node="n", links=(), state=()),)
        values: dict[str, Any] = {
            "job": JOB,
            "replica": replica,
            "incarnation": 0,
            "ranks": ranks,
            "plan": "p",
            "report": Report(step=0),
            "client_nonce": self.my_nonce,
            "proof": prove(token, "member-hello", JOB, challenge.nonce),
        }
        self.send(Hello(**(values | changes)))

    def ended(self) -> bool:
        """The other side has closed (waits for it)."""
        try:
            while self.sock.recv(65536):
                pass
        except ConnectionError:
            pass
        return True

    def close(self) -> None:
        self.sock.close()


class Script:
    """A machine that records what it is fed and answers from a table of functions."""

    def __init__(self) -> None:
        self.events: queue.Queue[CoordinatorEvent] = queue.Queue()
        self.answers: dict[type, Callable[[Any], Iterable[CoordinatorEffect]]] = {}
        self.tick_at: float | None = None

    def handle(self, event: CoordinatorEvent, now: float) -> Iterable[CoordinatorEffect]:
        self.events.put(event)
        answer = self.answers.get(type(event))
        return answer(event) if answer else ()

    def deadline(self) -> float | None:
        return self.tick_at

    def view(self, now: float, wall: float) -> JobView:
        return JobView(
            name=JOB,
            state="running",
            reason="",
            step=3,
            term=1,
            epoch=1,
            contributors=(),
            replicas_wanted=3,
            min_replicas=1,
            replicas=(),
            stalls=(),
            settings={},
        )

    def until(self, kind: type, timeout_s: float = 60.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            event = self.events.get(timeout=max(0.01, deadline - time.monotonic()))
            if isinstance(event, kind):
                return event


def poll(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def running(tmp_path: Path, script: Script) -> Iterator[Running]:
    running = Running(tmp_path / "store", lambda _claim: script)
    yield running
    running.stop()


@pytest.fixture
def connect(running: Running) -> Iterator[Callable[[], Client]]:
    clients: list[Client] = []

    def connect() -> Client:
        clients.append(Client(running.port))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
