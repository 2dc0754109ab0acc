"""A member's control loop against a coordinator played by hand, over real sockets: handshake, impostors, restarts."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ftar_core.protocol.effects import (
    ApplyCommit,
    End,
    EnterEpoch,
    FollowSources,
    MemberEffect,
    Reconnect,
    SendHello,
    SendOutdated,
    Tell,
    Wait,
)
from ftar_core.protocol.events import Challenged, Disconnected, LeaveNow, MemberEvent, Received, StepReduced, Tick
from ftar_core.runtime import connection as connection_module
from ftar_core.runtime.connection import MemberRuntime
from ftar_core.runtime.rails import Rail
from ftar_core.runtime.settings import Settings
from ftar_core.wire.address import Address
from ftar_core.wire.codec import FRAME_LIMIT, FrameParser, encode, nonce, prove, proved, to_coordinator, vouch
from ftar_core.wire.exits import RankExit
from ftar_core.wire.ids import NO_EPOCH, EpochId, Term
from ftar_core.wire.messages import (
    Challenge,
    Deal,
    Done,
    EpochInfo,
    Hello,
    Hold,
    Leaving,
    Message,
    NewEpoch,
    Outdated,
    Outline,
    RankInfo,
    Refused,
    Report,
    ToCoordinator,
    Welcome,
)

TOKEN = b"the token of the job"
TERM = Term(3, "abc")


class Machine:
    """The smallest member: says hello, tells Done, ends when told to."""

    def __init__(self) -> None:
        self.events: queue.Queue[MemberEvent] = queue.Queue()
        self.promised = TERM
        self.tick_at: float | None = None
        self.effects: dict[type, Callable[[Any], list[MemberEffect]]] = {
            Challenged: self.challenged,
            StepReduced: lambda e: [Tell(Done(step=e.step, epoch=e.epoch, digest=e.digest, finite=e.finite))],
            LeaveNow: lambda e: [Tell(Leaving(reason=e.reason)), End(e.exit_code, e.reason)],
            Disconnected: lambda e: [Wait(e.why), Reconnect(0.0)],
            Received: self.received,
        }

    def challenged(self, event: Challenged) -> list[MemberEffect]:
        if event.term < self.promised:
            return [SendOutdated(self.promised), Reconnect(0.05)]
        return [SendHello(7, Report(step=5, promised=self.promised))]

    def received(self, event: Received) -> list[MemberEffect]:
        if isinstance(event.message, Refused):
            return [End(RankExit.REFUSED, event.message.reason)] if not event.message.retry else []
        if isinstance(event.message, NewEpoch):
            m = event.message
            return [EnterEpoch(m.epoch, m.step, m.deal, True, m.last_commit_epoch)]
        return []

    def handle(self, event: MemberEvent, now: float) -> list[MemberEffect]:
        self.events.put(event)
        if isinstance(event, Tick):
            self.tick_at = None
        return self.effects.get(type(event), lambda _: [])(event)

    def deadline(self) -> float | None:
        return self.tick_at

    def until(self, kind: type, timeout_s: float = 60.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            event = self.events.get(timeout=max(0.01, deadline - time.monotonic()))
            if isinstance(event, kind):
                return event


class Delegate:
    def __init__(self) -> None:
        self.calls: queue.Queue[tuple[str, Any, float]] = queue.Queue()

    def describe(self) -> tuple[tuple[RankInfo, ...], str, int]:
        return (RankInfo(rank=0, node="node0", links=(), state=()),), "plan", 100

    def outline(self) -> Outline:
        return Outline(plans=("plan",), parameters=b"what it is like")

    def welcomed(self, *args: Any) -> None:
        self.note("welcomed", args)

    def prepare_ring(self, epoch: EpochInfo) -> None:
        self.note("prepare_ring", epoch)

    def discard_ring(self, epoch: EpochId) -> None:
        self.note("discard_ring", epoch)

    def enter_epoch(self, order: EnterEpoch) -> None:
        self.note("enter_epoch", order)

    def apply_commit(self, order: ApplyCommit) -> None:
        self.note("apply_commit", order)

    def follow_sources(self, order: FollowSources) -> None:
        self.note("follow_sources", order)

    def waiting(self, reason: str) -> None:
        self.note("waiting", reason)

    def end(self, exit_code: int, reason: str) -> None:
        self.note("end", (exit_code, reason))

    def note(self, name: str, what: Any) -> None:
        self.calls.put((name, what, time.monotonic()))

    def until(self, name: str, timeout_s: float = 60.0) -> Any:
        return self.until_call(name, timeout_s)[1]

    def until_call(self, name: str, timeout_s: float = 60.0) -> tuple[str, Any, float]:
        deadline = time.monotonic() + timeout_s
        while True:
            call = self.calls.get(timeout=max(0.01, deadline - time.monotonic()))
            if call[0] == name:
                return call


class Coordinator:
    """The other end, by hand."""

    def __init__(self, port: int = 0) -> None:
        self.server = socket.create_server(("127.0.0.1", port))
        self.server.settimeout(60)
        self.port: int = self.server.getsockname()[1]
        self.sock: socket.socket | None = None

    def accept(self, term: Term = TERM, job: str = "demo", version: int = 1, token: bytes = TOKEN) -> None:
        if self.sock is not None:
            self.sock.close()
        self.sock, _ = self.server.accept()
        self.sock.settimeout(60)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.parser: FrameParser[ToCoordinator] = FrameParser(to_coordinator, FRAME_LIMIT)
        self.waiting: list[ToCoordinator] = []
        mine = nonce()
        proof = prove(token, "challenge", job, vouch(mine, term))
        self.challenge = Challenge(job=job, nonce=mine, term=term, version=version, proof=proof)
        self.send(self.challenge)

    def send(self, message: Message) -> None:
        assert self.sock is not None
        self.sock.sendall(encode(message))

    def next(self) -> ToCoordinator:
        assert self.sock is not None
        while not self.waiting:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError
            self.waiting += self.parser.feed(data)
        return self.waiting.pop(0)

    def hello(self) -> Hello:
        hello = self.next()
        assert isinstance(hello, Hello)
        assert proved(TOKEN, "member-hello", "demo", self.challenge.nonce, hello.proof)
        return hello

    def welcome(self, token: bytes = TOKEN, term: Term = TERM) -> Hello:
        hello = self.hello()
        proof = prove(token, "welcome", "demo", hello.client_nonce)
        self.send(Welcome(term=term, incarnation=8, proof=proof, cookie=b"c" * 16, heartbeat_port=99))
        return hello

    def close(self) -> None:
        self.server.close()
        if self.sock is not None:
            self.sock.close()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    coordinator = Coordinator()
    yield coordinator
    coordinator.close()


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def delegate() -> Delegate:
    return Delegate()


def settings(port: int, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "coordinator": Address("127.0.0.1", port),
        "job": "demo",
        "replica": "r0",
        "token": TOKEN,
        "rails": (Rail("lo", "", "127.0.0.1"),),
        "node": "node0",
    }
    return Settings(**(values | changes))


@pytest.fixture
def runtime(coordinator: Coordinator, machine: Machine, delegate: Delegate) -> Iterator[MemberRuntime]:
    runtime = MemberRuntime(settings(coordinator.port), delegate, machine)
    runtime.start()
    yield runtime
    runtime.close()
    assert not runtime.alive


def test_the_handshake_both_ways(
    runtime: MemberRuntime, coordinator: Coordinator, machine: Machine, delegate: Delegate
) -> None:
    coordinator.accept()
    hello = coordinator.welcome()
    assert (hello.replica, hello.incarnation, hello.plan, hello.last_step) == ("r0", 7, "plan", 100)
    assert hello.report == Report(step=5, promised=TERM)
    assert delegate.until("welcomed") == (b"c" * 16, "127.0.0.1", 99, 100, 8)
    assert isinstance(machine.until(Received).message, Welcome)
    runtime.post(StepReduced(5, NO_EPOCH, 1, True))
    assert coordinator.next() == Done(step=5, epoch=NO_EPOCH, digest=1, finite=True)


def test_what_happens_between_hello_and_welcome_is_told_after_it(
    runtime: MemberRuntime, coordinator: Coordinator, machine: Machine, delegate: Delegate
) -> None:
    coordinator.accept()
    hello = coordinator.hello()
    runtime.post(StepReduced(5, NO_EPOCH, 1, True))
    machine.until(StepReduced)
    proof = prove(TOKEN, "welcome", "demo", hello.client_nonce)
    coordinator.send(Welcome(term=TERM, incarnation=8, proof=proof))
    assert isinstance(coordinator.next(), Done)


def test_an_impostor_without_the_token_learns_nothing_and_decides_nothing(
    runtime: MemberRuntime, coordinator: Coordinator, machine: Machine, delegate: Delegate
) -> None:
    coordinator.accept()
    coordinator.welcome(token=b"a guess")
    coordinator.send(NewEpoch(term=TERM, epoch=EPOCH, step=5, deal=DEAL, lost={}, last_commit_epoch=NO_EPOCH))
    assert "does not know the job token" in machine.until(Disconnected).why
    coordinator.accept()
    coordinator.welcome()
    delegate.until("welcomed")
    assert not any(isinstance(e, Received) and isinstance(e.message, NewEpoch) for e in list(machine.events.queue))


def test_a_made_up_term_is_not_promised(
    runtime: MemberRuntime, coordinator: Coordinator, machine: Machine, delegate: Delegate
) -> None:
    coordinator.accept()
    coordinator.welcome()
    delegate.until("welcomed")
    assert coordinator.sock is not None
    coordinator.sock.close()
    machine.until(Disconnected)
    coordinator.accept(Term(1 << 60, "evil"), token=b"a guess")  # something else took the port
    assert "same job token" in machine.until(Disconnected).why
    assert not any(isinstance(e, Challenged) for e in list(machine.events.queue))


def test_a_wrong_token_is_said_at_once(runtime: MemberRuntime, coordinator: Coordinator, delegate: Delegate) -> None:
    coordinator.accept(token=b"the token of another job")
    code, why = delegate.until("end")
    assert code == RankExit.REFUSED
    assert "FTAR_TOKEN_FILE" in why


def test_messages_before_the_proof_are_refused(
    runtime: MemberRuntime, coordinator: Coordinator, machine: Machine
) -> None:
    coordinator.accept()
    coordinator.hello()
    coordinator.send(Hold(term=TERM, reason="believe me"))
    assert "during the handshake" in machine.until(Disconnected).why


def test_a_refusal_ends_a_member_that_was_never_welcome(
    runtime: MemberRuntime, coordinator: Coordinator, delegate: Delegate
) -> None:
    coordinator.accept()
    coordinator.hello()
    coordinator.send(Refused(reason="wrong job token", retry=False))
    assert delegate.until("end") == (RankExit.REFUSED, "wrong job token")


def test_a_strangers_refusal_does_not_end_a_running_member(
    runtime: MemberRuntime, coordinator: Coordinator, machine: Machine, delegate: Delegate
) -> None:
    coordinator.accept()
    coordinator.welcome()
    delegate.until("welcomed")
    assert coordinator.sock is not None
    coordinator.sock.close()
    machine.until(Disconnected)
    coordinator.accept()  # something else took the port
    coordinator.hello()
    coordinator.send(Refused(reason="go away", retry=False))
    assert "does not know the job token" in machine.until(Disconnected).why
    coordinator.accept()  # and now the real one, which means it
    hello = coordinator.hello()
    proof = prove(TOKEN, "refused", "demo", hello.client_nonce)
    coordinator.send(Refused(reason="another model", retry=False, proof=proof))
    assert delegate.until("end") == (RankExit.REFUSED, "another model")


@pytest.mark.parametrize(("changes", "reason"), [({"job": "other"}, "runs job 'other'"), ({"version": 2}, "version 2")])
def test_the_wrong_coordinator_is_said_at_once(
    runtime: MemberRuntime, coordinator: Coordinator, delegate: Delegate, changes: dict[str, Any], reason: str
) -> None:
    coordinator.accept(**changes)
    code, why = delegate.until("end")
    assert code == RankExit.REFUSED
    assert reason in why


def test_an_older_coordinator_is_told_that_it_is_outdated(
    runtime: MemberRuntime, coordinator: Coordinator, machine: Machine
) -> None:
    machine.promised = Term(9, "new")
    coordinator.accept()
    outdated = coordinator.next()
    assert isinstance(outdated, Outdated)
    assert outdated.promised == Term(9, "new")
    assert proved(TOKEN, "outdated", "demo", coordinator.challenge.nonce, outdated.proof)


def test_a_coordinator_comes_back(
    runtime: MemberRuntime, coordinator: Coordinator, machine: Machine, delegate: Delegate
) -> None:
    coordinator.accept()
    coordinator.welcome()
    delegate.until("welcomed")
    port = coordinator.port
    coordinator.close()
    machine.until(Disconnected)
    assert delegate.until("waiting")
    again = Coordinator(port)
    try:
        again.accept()
        again.welcome()
        delegate.until("welcomed")
    finally:
        again.close()


@pytest.mark.parametrize("junk", [b"HTTP/1.0 400 Bad Request\r\n\r\n", b"\xff" * 8, b"\x01\x00\x00\x00\xc1"])
def test_junk_from_the_port_is_survived(
    runtime: MemberRuntime, coordinator: Coordinator, machine: Machine, delegate: Delegate, junk: bytes
) -> None:
    sock, _ = coordinator.server.accept()
    sock.sendall(junk)
    machine.until(Disconnected)
    sock.close()
    coordinator.accept()
    coordinator.welcome()
    delegate.until("welcomed")


def test_a_silent_port_is_given_up(
    coordinator: Coordinator, machine: Machine, delegate: Delegate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HANDSHAKE_S", 0.05)
    runtime = MemberRuntime(settings(coordinator.port), delegate, machine)
    runtime.start()
    assert "no answer" in machine.until(Disconnected).why
    runtime.close()


def test_no_coordinator_for_too_long_ends_the_member(
    machine: Machine, delegate: Delegate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "WAIT_SLACK_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    runtime = MemberRuntime(settings(port, coordinator_wait_s=0.3), delegate, machine)
    runtime.start()
    code, reason = delegate.until("end")
    assert code == RankExit.RESTART
    assert f"no coordinator at 127.0.0.1:{port}" in reason
    assert "refused" in reason
    runtime.close()


def test_a_name_that_does_not_resolve(machine: Machine, delegate: Delegate) -> None:
    runtime = MemberRuntime(settings(7600, coordinator=Address("no-such-host.invalid", 7600)), delegate, machine)
    runtime.start()
    assert "cannot resolve no-such-host.invalid" in machine.until(Disconnected).why
    runtime.close()


def test_a_name_that_resolves(coordinator: Coordinator, machine: Machine, delegate: Delegate) -> None:
    runtime = MemberRuntime(settings(0, coordinator=Address("localhost", coordinator.port)), delegate, machine)
    runtime.start()
    coordinator.accept()
    coordinator.welcome()
    delegate.until("welcomed")
    runtime.close()


def test_leaving_is_said_before_the_end(runtime: MemberRuntime, coordinator: Coordinator, delegate: Delegate) -> None:
    coordinator.accept()
    coordinator.welcome()
    delegate.until("welcomed")
    runtime.post(LeaveNow("the update failed", RankExit.RESTART))
    assert coordinator.next() == Leaving(reason="the update failed")
    with pytest.raises(EOFError):
        coordinator.next()
    assert delegate.until("end") == (RankExit.RESTART, "the update failed")


def test_a_failing_delegate_ends_the_session_loudly(
    runtime: MemberRuntime,
    coordinator: Coordinator,
    delegate: Delegate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(order: EnterEpoch) -> None:
        raise RuntimeError("no such ring")

    monkeypatch.setattr(delegate, "enter_epoch", broken)
    coordinator.accept()
    coordinator.welcome()
    coordinator.send(NewEpoch(term=TERM, epoch=EPOCH, step=5, deal=DEAL, lost={}, last_commit_epoch=NO_EPOCH))
    code, reason = delegate.until("end")
    assert code == RankExit.RESTART
    assert "no such ring" in reason
    assert "Traceback" in caplog.text


def test_a_new_epoch_reaches_the_session_at_once(
    runtime: MemberRuntime, coordinator: Coordinator, delegate: Delegate
) -> None:
    coordinator.accept()
    coordinator.welcome()
    delegate.until("welcomed")
    delays = []
    for number in range(50):
        epoch = EpochInfo(id=EpochId(TERM, number + 1), members=())
        sent = time.monotonic()
        coordinator.send(NewEpoch(term=TERM, epoch=epoch, step=5, deal=DEAL, lost={}, last_commit_epoch=NO_EPOCH))
        delays.append(delegate.until_call("enter_epoch")[2] - sent)
    print(f"NewEpoch to the delegate: median {sorted(delays)[25] * 1e3:.2f} ms, worst {max(delays) * 1e3:.2f} ms")
    assert sorted(delays)[25] < 0.1  # a liveness bound; about 0.2 ms on an idle core


def test_descriptors_of_the_session_are_served_in_the_same_thread(
    coordinator: Coordinator, machine: Machine, delegate: Delegate
) -> None:
    read, write = os.pipe()
    seen: queue.Queue[str] = queue.Queue()
    box: list[MemberRuntime] = []

    def ready() -> None:
        os.read(read, 1)
        seen.put(threading.current_thread().name)
        box[0].post(StepReduced(1, NO_EPOCH, 0, True))

    runtime = MemberRuntime(settings(coordinator.port), delegate, machine, extra=[(read, ready)])
    box.append(runtime)
    runtime.start()
    os.write(write, b"x")
    assert seen.get(timeout=60) == "ftar-member"
    machine.until(StepReduced)
    runtime.close()
    os.close(read)
    os.close(write)


def test_deadlines_tick(coordinator: Coordinator, machine: Machine, delegate: Delegate) -> None:
    machine.tick_at = time.monotonic() + 0.05
    runtime = MemberRuntime(settings(coordinator.port), delegate, machine)
    runtime.start()
    machine.until(Tick)
    runtime.close()


def test_posting_from_many_threads_loses_nothing(
    runtime: MemberRuntime, coordinator: Coordinator, machine: Machine, delegate: Delegate
) -> None:
    coordinator.accept()
    coordinator.welcome()
    delegate.until("welcomed")

    def post(base: int) -> None:
        for step in range(base, base + 200):
            runtime.post(StepReduced(step, NO_EPOCH, 0, True))

    threads = [threading.Thread(target=post, args=(1000 * n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    steps = []
    while len(steps) < 800:
        message = coordinator.next()
        assert isinstance(message, Done)
        steps.append(message.step)
    for thread in threads:
        thread.join()
    assert sorted(steps) == [1000 * n + i for n in range(1, 5) for i in range(200)]
    for n in range(1, 5):  # each thread's in its order
        mine = [s for s in steps if s // 1000 == n]
        assert mine == sorted(mine)


def test_close_before_start_and_twice(coordinator: Coordinator, machine: Machine, delegate: Delegate) -> None:
    runtime = MemberRuntime(settings(coordinator.port), delegate, machine)
    runtime.close()
    runtime.close()
    runtime.post(Tick())


EPOCH = EpochInfo(id=EpochId(TERM, 1), members=())
DEAL = Deal(batches={}, cursor=0)
