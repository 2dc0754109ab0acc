"""The coordinator's shell around a scripted machine: who gets in, what is carried out in which order, how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable

import pytest

from ftar_core.coordinator import connections as connections_module
from ftar_core.coordinator import peers as peers_module
from ftar_core.coordinator.listen import listen
from ftar_core.errors import AuthError, ProtocolRefused, SettingsError, StoreError, WireError
from ftar_core.protocol.effects import Close, Emit, Persist, Reply, Send, Stop
from ftar_core.protocol.events import (
    BeatSeen,
    ConnectionClosed,
    MemberHello,
    MemberMessage,
    Operator,
    OutdatedSeen,
    RecordFailed,
    Tick,
)
from ftar_core.protocol.record import Record
from ftar_core.runtime import channel as channel_module
from ftar_core.wire import heartbeat
from ftar_core.wire.address import Address
from ftar_core.wire.codec import LENGTH, proved
from ftar_core.wire.ids import NO_EPOCH, Term
from ftar_core.wire.messages import (
    Challenge,
    Deal,
    Done,
    Endpoint,
    EpochInfo,
    EventView,
    Hold,
    Leaving,
    OpReply,
    Outdated,
    RankInfo,
    Refused,
    Welcome,
)
from ftar_core.wire.operator import OperatorClient

from .conftest import JOB, OPERATOR, TOKEN, Client, Running, Script, poll
from .members import Fabric, SimMember

Connect = Callable[[], Client]


def welcome(script: Script, running: Running) -> None:
    term = running.claim.term
    script.answers[MemberHello] = lambda e: [Send(e.conn, Welcome(term=term, incarnation=4, proof=b""))]


def record(running: Running) -> Record:
    return Record(
        job=JOB,
        term=running.claim.term,
        epoch=EpochInfo(id=NO_EPOCH, members=()),
        first_step=1,
        deal=Deal(batches={}, cursor=0),
        last_commit_epoch=NO_EPOCH,
        next_incarnation=1,
        slots={},
    )


def event(kind: str) -> EventView:
    return EventView(seq=0, time=0.0, source="coordinator", kind=kind, object="r0", reason="because")


# --- who gets in ---------------------------------------------------------------------------------------------------


def test_a_member_with_the_token_is_welcome(running: Running, script: Script, connect: Connect) -> None:
    welcome(script, running)
    client = connect()
    client.hello()
    answer = client.next()
    assert isinstance(answer, Welcome)
    assert proved(TOKEN, "welcome", JOB, client.my_nonce, answer.proof)
    assert (answer.term, answer.incarnation, answer.heartbeat_port) == (running.claim.term, 4, running.port)
    assert len(answer.cookie) == 16
    conn = script.until(MemberHello).conn
    client.send(Done(step=1, epoch=NO_EPOCH, digest=2, finite=True))
    assert script.until(MemberMessage).conn == conn
    client.close()
    assert script.until(ConnectionClosed).conn == conn


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token": b"a guess of mine!"}, "wrong job token"),
        ({"token": OPERATOR}, "wrong job token"),
        ({"job": "other"}, "job 'demo', not 'other'"),
        ({"version": 9}, "version 9"),
        ({"replica": "../etc"}, "not a valid name"),
        ({"proof": b""}, "wrong job token"),
    ],
)
def test_strangers_are_refused_with_a_reason(
    running: Running, script: Script, connect: Connect, changes: dict[str, object], reason: str
) -> None:
    client = connect()
    client.hello(**changes)  # type: ignore[arg-type]
    answer = client.next()
    assert isinstance(answer, Refused)
    assert reason in answer.reason
    assert not answer.retry
    assert client.ended()
    assert script.events.empty()
    assert [e.kind for e in running.events.after(0)] == ["stranger.dropped"]


def test_a_refusal_to_a_proven_member_carries_the_proof(running: Running, script: Script, connect: Connect) -> None:
    script.answers[MemberHello] = lambda e: [Send(e.conn, Refused(reason="plan", retry=False)), Close(e.conn, "plan")]
    client = connect()
    client.hello()
    answer = client.next()
    assert isinstance(answer, Refused)
    assert proved(TOKEN, "refused", JOB, client.my_nonce, answer.proof)
    assert client.ended()
    script.until(ConnectionClosed)


@pytest.mark.parametrize(
    "junk",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00", LENGTH.pack(1 << 31), b"\0" * 64, b"SSH-2.0-x\r\n"],
)
def test_junk_is_dropped_at_once(running: Running, connect: Connect, junk: bytes) -> None:
    client = connect()
    assert isinstance(client.next(), Challenge)
    client.sock.sendall(junk)
    assert client.ended()


def test_who_says_nothing_is_dropped_in_time(
    running: Running, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "STRANGER_S", 0.05)
    assert connect().ended()


def test_half_open_connections_cannot_lock_out_a_member(
    running: Running, script: Script, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "MAX_STRANGERS", 8)
    welcome(script, running)
    flood = [connect() for _ in range(30)]
    member = connect()
    member.hello()
    assert isinstance(member.next(), Welcome)
    assert all(client.ended() for client in flood[:22])
    lines = [e for e in running.events.after(0) if e.kind == "stranger.dropped"]
    assert len(lines) == 1  # named once, not thirty times


def many_ranks(count: int = 1500) -> tuple[RankInfo, ...]:
    at = tuple(Endpoint(rail=f"rail{n}", addr=f"10.0.{n}.1", port=40000 + n) for n in range(2))
    return tuple(RankInfo(rank=n, node=f"node{n // 8}", links=at, state=at) for n in range(count))


def test_a_replica_of_many_ranks_may_say_more_than_a_stranger_once_it_has_proved_itself(
    running: Running, script: Script, connect: Connect
) -> None:
    welcome(script, running)
    ranks = many_ranks()
    member = connect()
    member.hello(ranks=ranks, knock=TOKEN)
    assert isinstance(member.next(), Welcome)
    assert script.until(MemberHello).hello.ranks == ranks
    for knock in (None, b"another token"):
        stranger = connect()
        with contextlib.suppress(ConnectionError):
            stranger.hello(ranks=ranks, knock=knock)
        assert stranger.ended()
    assert script.events.empty()


def test_the_member_s_side_announces_a_long_hello(
    running: Running, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    welcome(script, running)
    monkeypatch.setattr(SimMember, "describe", lambda self: (many_ranks(), "plan", 0))
    member = SimMember(Fabric(), "r0", running.port, beats=False)
    try:
        assert len(script.until(MemberHello).hello.ranks) == 1500
    finally:
        member.stop()


def test_members_cannot_say_hello_twice_or_act_as_operators(running: Running, script: Script, connect: Connect) -> None:
    welcome(script, running)
    client = connect()
    client.hello()
    client.next()
    client.send(Outdated(promised=Term(99, "x"), proof=b""))
    assert client.ended()
    assert "out of place" in script.until(ConnectionClosed).why


def test_a_member_that_does_not_read_is_closed(
    running: Running, script: Script, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "WRITE_CAP_BYTES", 100_000)
    welcome(script, running)
    script.answers[MemberMessage] = lambda e: [Send(e.conn, Hold(term=running.claim.term, reason="x" * 50_000))] * 400
    client = connect()
    client.hello()
    client.next()
    client.send(Leaving(reason="talk to me"))
    assert "does not read" in script.until(ConnectionClosed).why


# --- heartbeats ----------------------------------------------------------------------------------------------------


def test_heartbeats_are_matched_by_cookie_and_junk_is_not(running: Running, script: Script, connect: Connect) -> None:
    welcome(script, running)
    client = connect()
    client.hello()
    answer = client.next()
    assert isinstance(answer, Welcome)
    conn = script.until(MemberHello).conn
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        good = heartbeat.FORMAT.pack(b"FTHB", heartbeat.VERSION, 2, 0, answer.cookie, 1, 17, 5, 4)
        others = heartbeat.TEAM_FORMAT.pack(3, 2, 150, 1, 1, 1, 17, 4, 3)
        for junk in (
            b"",
            b"x",
            b"\0" * 48,
            good[:-1],
            good + b"x",
            good + others[:-1],
            good + heartbeat.TEAM_FORMAT.pack(3, 2, 150, 1, 1, 99, 17, 4, 3),
            good.replace(answer.cookie, b"z" * 16),
            b"y" * 2000,
        ):
            udp.sendto(junk, ("127.0.0.1", running.port))
        udp.sendto(struct.pack("<4sBB42x", b"FTHB", heartbeat.VERSION, 200), ("127.0.0.1", running.port))
        udp.sendto(good, ("127.0.0.1", running.port))
        udp.sendto(good + others, ("127.0.0.1", running.port))
    assert script.until(BeatSeen) == BeatSeen(conn, 2, 17, 5, 4)
    team = heartbeat.TeamBeat(3, 2, 150, 1, 1, heartbeat.Phase.FORWARD, 17, 4, 3)
    assert script.until(BeatSeen) == BeatSeen(conn, 2, 17, 5, 4, team)
    assert script.events.empty()


# --- effects -------------------------------------------------------------------------------------------------------


def test_the_record_is_on_disk_before_anybody_hears_of_it(running: Running, script: Script, connect: Connect) -> None:
    wanted = record(running)
    script.answers[MemberHello] = lambda e: [
        Persist(wanted),
        Send(e.conn, Welcome(term=running.claim.term, incarnation=1, proof=b"")),
    ]
    seen: list[bool] = []
    real = running.service._connections.send

    def send(conn: int, message: object) -> None:
        seen.append(running.store.record_path.exists())
        real(conn, message)  # type: ignore[arg-type]

    running.service._connections.send = send  # type: ignore[method-assign, assignment]
    client = connect()
    client.hello()
    client.next()
    assert seen == [True]


def test_nothing_of_an_epoch_is_sent_when_the_record_fails(
    running: Running, script: Script, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_record: Record) -> None:
        raise StoreError("record.json: cannot be written: No space left on device", hint="df -h")

    monkeypatch.setattr(running.store, "write", fail)
    term = running.claim.term
    script.answers[MemberHello] = lambda e: [
        Send(e.conn, Welcome(term=term, incarnation=1, proof=b"")),
        Persist(record(running)),
        Send(e.conn, Hold(term=term, reason="never sent")),
        Emit(event("never.emitted")),
    ]
    script.answers[RecordFailed] = lambda e: [Emit(event("record.failed"))]
    script.answers[MemberMessage] = lambda e: [Send(e.conn, Hold(term=term, reason="still here"))]
    client = connect()
    client.hello()
    assert isinstance(client.next(), Welcome)
    assert "No space left" in script.until(RecordFailed).reason
    client.send(Leaving(reason="are you there?"))
    answer = client.next()
    assert isinstance(answer, Hold)
    assert answer.reason == "still here"
    assert [e.kind for e in running.events.after(0)] == ["record.failed"]


def test_a_fenced_store_ends_the_service_before_anything_is_sent(
    running: Running, script: Script, connect: Connect
) -> None:
    term = running.claim.term
    script.answers[MemberHello] = lambda e: [
        Persist(record(running)),
        Send(e.conn, Welcome(term=term, incarnation=1, proof=b"")),
    ]
    type(running.store)(running.store.directory, JOB).claim()
    client = connect()
    client.hello()
    with pytest.raises(EOFError):
        client.next()
    code, reason = running.wait()
    assert code == 75
    assert "newer coordinator" in reason


def test_a_quiet_coordinator_notices_its_successor(running: Running) -> None:
    type(running.store)(running.store.directory, JOB).claim()
    code, reason = running.wait()
    assert (code, "newer coordinator" in reason) == (75, True)


def test_an_outdated_coordinator_ends_and_its_next_life_has_a_higher_term(
    running: Running, script: Script, connect: Connect
) -> None:
    script.answers[OutdatedSeen] = lambda e: [Stop(75, "outdated", promised=e.promised)]
    client = connect()
    challenge = client.next()
    assert isinstance(challenge, Challenge)
    forged = Outdated(promised=Term(1000, "z"), proof=b"\0" * 32)
    client.send(forged)
    assert client.ended()
    client = connect()
    challenge = client.next()
    assert isinstance(challenge, Challenge)
    from ftar_core.wire.codec import prove

    client.send(Outdated(promised=Term(30, "z"), proof=prove(TOKEN, "outdated", JOB, challenge.nonce)))
    assert running.wait() == (75, "outdated")
    assert type(running.store)(running.store.directory, JOB).claim().term.number == 31


def test_what_was_sent_last_arrives_although_the_service_ends(
    running: Running, script: Script, connect: Connect
) -> None:
    welcome(script, running)
    script.answers[MemberMessage] = lambda e: [
        Send(e.conn, Hold(term=running.claim.term, reason="y" * 1_000_000)),
        Stop(0, "finished"),
    ]
    client = connect()
    client.hello()
    client.next()
    client.send(Leaving(reason="a"))
    client.send(Leaving(reason="unread by the service: a plain close would answer with a reset"))
    answer = client.next()
    assert isinstance(answer, Hold)
    assert len(answer.reason) == 1_000_000
    with pytest.raises(EOFError):
        client.next()
    client.close()
    assert running.wait() == (0, "finished")


def test_time_passes(running: Running, script: Script) -> None:
    script.tick_at = 0.0  # long ago; must tick, and not spin
    running.service._waker.wake()
    script.until(Tick)
    script.until(Tick)


def test_a_stopped_service_says_nothing_to_members(running: Running, script: Script, connect: Connect) -> None:
    welcome(script, running)
    client = connect()
    client.hello()
    client.next()
    running.service.stop(75, "SIGTERM")
    with pytest.raises(EOFError):
        client.next()
    client.close()
    assert running.wait() == (75, "SIGTERM")
    with pytest.raises(OSError, match="refused"):
        Client(running.port)


def test_a_taken_port_is_said_before_the_store_is_claimed(running: Running) -> None:
    with pytest.raises(SettingsError, match="Address already in use") as caught:
        listen(Address("127.0.0.1", running.port))
    assert f"ss -tulnp sport = :{running.port}" in caught.value.hint
    with pytest.raises(SettingsError, match="cannot be resolved"):
        listen(Address("no-such-host.invalid", 1))
    with pytest.raises(SettingsError, match="Cannot assign"):
        listen(Address("192.0.2.1", 0))


# --- operators -----------------------------------------------------------------------------------------------------


def operator(port: int, token: bytes = OPERATOR, job: str = JOB, timeout_s: float = 60.0) -> OperatorClient:
    return OperatorClient("127.0.0.1", port, job, token, "alice", timeout_s)


def test_an_operators_request_and_its_answer(running: Running, script: Script) -> None:
    script.answers[Operator] = lambda e: [Reply(e.conn, OpReply(id=e.request.id, code="ok", text="drained"))]
    with operator(running.port) as client:
        reply = client.request("drain", replica="r1", reason="test")
        assert (reply.code, reply.text) == ("ok", "drained")
        asked = script.until(Operator)
        assert (asked.principal, asked.request.op, asked.request.replica) == ("alice", "drain", "r1")
        client.request("drain", replica="r2", reason="test")
        assert script.until(Operator).conn == asked.conn


def test_status_is_answered_with_the_process_behind_it(running: Running, script: Script) -> None:
    with operator(running.port) as client:
        job = client.request("status").job
    assert job is not None
    assert (job.name, job.step, job.pid) == (JOB, 3, os.getpid())
    assert job.started > 1e9


def test_events_are_numbered_dated_kept_and_written(running: Running, script: Script, connect: Connect) -> None:
    script.answers[Operator] = lambda e: [
        Emit(event("replica.lost")),
        Reply(e.conn, OpReply(id=e.request.id, code="ok", text="")),
    ]
    with operator(running.port) as client:
        client.request("evict", replica="r0")
        client.request("evict", replica="r0")
        found = client.request("events").events
        assert [(e.seq, e.kind) for e in found] == [(1, "replica.lost"), (2, "replica.lost")]
        assert all(e.time > 1e9 for e in found)
        assert [e.seq for e in client.request("events", after=1).events] == [2]
    lines = (running.store.directory / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [1, 2]


def test_operators_need_their_own_token(running: Running) -> None:
    with pytest.raises(AuthError, match="wrong operator token"):
        operator(running.port, TOKEN).connect()
    with pytest.raises(ProtocolRefused, match="runs job 'demo', not 'other'"):
        operator(running.port, job="other").connect()


def test_an_impostor_on_the_coordinators_port_gets_no_request(script: Script) -> None:
    import threading

    from ftar_core.wire.codec import encode

    with socket.create_server(("127.0.0.1", 0)) as server:
        got: list[bytes] = []

        def impostor() -> None:
            sock, _ = server.accept()
            with sock:
                sock.settimeout(60)
                sock.sendall(encode(Challenge(job=JOB, nonce=b"n" * 16, term=Term(1, "a"))))
                sock.recv(65536)
                sock.sendall(encode(Welcome(term=Term(1, "a"), incarnation=0, proof=b"\0" * 32)))
                got.append(sock.recv(65536))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(AuthError, match="does not know the operator token"):
            operator(server.getsockname()[1]).request("evict", replica="r0")
        thread.join()
    assert got == [b""]


def test_errors_of_the_operator_client(running: Running, script: Script) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(TimeoutError, match="did not answer in time"):
            operator(port, timeout_s=0.05).connect()
    with pytest.raises(ConnectionRefusedError):
        operator(port).connect()
    client = operator(running.port)
    with pytest.raises(TimeoutError):  # the scripted machine does not answer
        client.request("drain", timeout_s=0.05)
    script.answers[Operator] = lambda e: [Reply(e.conn, OpReply(id=e.request.id, code="ok", text="later"))]
    assert client.request("drain").text == "later"  # on a new connection; the late answer is nobody's
    client.close()


def test_the_operator_client_survives_a_restart_between_requests(running: Running, script: Script) -> None:
    script.answers[Operator] = lambda e: [
        Reply(e.conn, OpReply(id=e.request.id, code="ok", text="")),
        Close(e.conn, "bye"),
    ]
    with operator(running.port) as client:
        assert client.request("drain").code == "ok"
        sock = client._socket
        assert sock is not None
        poll(lambda: client._stale(sock), "the coordinator closes")
        assert client.request("status").code == "ok"


def test_something_else_on_the_port(running: Running) -> None:
    import threading

    with socket.create_server(("127.0.0.1", 0)) as server:

        def web() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=web)
        thread.start()
        with pytest.raises(WireError):
            operator(server.getsockname()[1]).connect()
        thread.join()


def test_the_stranger_log_is_rare_and_counts() -> None:
    log = peers_module.StrangerLog()
    assert log.note("10.0.0.9:1000", "junk", 0.0) == "stranger from 10.0.0.9:1000 dropped: junk"
    assert all(log.note(f"10.0.0.9:{n}", "junk", 1.0) is None for n in range(5))
    assert "5 more from there" in (log.note("10.0.0.9:2000", "junk", 61.0) or "")
    assert log.note("10.0.0.10:1", "junk", 61.0) is not None
    for n in range(5000):
        log.note(f"10.1.{n // 250}.{n % 250}:1", "junk", 62.0)
    assert len(log._seen) <= 1025


def test_strangers_do_not_delay_the_end(running: Running, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "FAREWELL_S", 50)
    silent = connect()
    silent.next()
    began = time.monotonic()
    running.service.stop(75, "SIGTERM")
    running.wait()
    assert time.monotonic() - began < 50
