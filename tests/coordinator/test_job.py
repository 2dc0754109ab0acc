"""A whole job on one machine: the real coordinator process, real members, a ring in memory; and everything that can
happen to them."""

from __future__ import annotations

import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftar_core.errors import StoreError
from ftar_core.protocol.config import Detection, JobConfig
from ftar_core.protocol.coordinator import Coordinator
from ftar_core.protocol.record import Record
from ftar_core.wire.codec import LENGTH
from ftar_core.wire.exits import RankExit
from ftar_core.wire.messages import Challenge
from ftar_core.wire.operator import OperatorClient

from .conftest import JOB, OPERATOR, Client, Running, poll
from .members import CoordinatorProcess, Fabric, SimMember

PATIENT = Detection(suspect_after_s=30.0, evict_after_s=60.0)

Start = Callable[..., CoordinatorProcess]
Members = Callable[..., list[SimMember]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[CoordinatorProcess] = []

    def start(*options: str, port: int = 0, **more: object) -> CoordinatorProcess:
        started.append(CoordinatorProcess(tmp_path, *options, port=port, **more))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def join(fabric: Fabric) -> Iterator[Members]:
    made: list[SimMember] = []

    def join(port: int, *names: str, **more: object) -> list[SimMember]:
        new = [SimMember(fabric, name, port, **more) for name in names]  # type: ignore[arg-type]
        made.extend(new)
        return new

    yield join
    for member in made:
        member.stop()


def operator(port: int) -> OperatorClient:
    return OperatorClient("127.0.0.1", port, JOB, OPERATOR, "alice")


def state_of(port: int, replica: str) -> str:
    with operator(port) as client:
        job = client.request("status").job
    assert job is not None
    return next((r.state for r in job.replicas if r.name == replica), "absent")


def no_gap(member: SimMember) -> None:
    steps = [c.step for c in member.commits]
    assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_three_members_finish_a_job(start: Start, join: Members, fabric: Fabric) -> None:
    coordinator = start("--steps", "200")
    members = join(coordinator.port, "r0", "r1", "r2")
    for member in members:
        member.reach(200)
        poll(lambda m=member: m.ended is not None, "the end")  # type: ignore[misc]
        assert member.ended is not None
        assert member.ended[0] == RankExit.FINISHED
        no_gap(member)
        assert member.step == 200
    assert coordinator.wait() == 0
    assert {c.contributors for c in fabric.history.values()} == {("r0", "r1", "r2")}
    gaps = sorted(b - a for a, b in zip(members[0].committed_at, members[0].committed_at[1:], strict=False))
    print(
        f"step to step: median {statistics.median(gaps) * 1e3:.2f} ms, 99th {gaps[int(len(gaps) * 0.99)] * 1e3:.2f} ms"
    )


def test_the_whole_internet_knocks_and_training_goes_on(start: Start, join: Members) -> None:
    coordinator = start()
    port = coordinator.port
    members = join(port, "r0", "r1", "r2")
    members[0].go_on()
    dice = random.Random(1)
    open_ends = []
    for junk in (
        b"GET / HTTP/1.1\r\n\r\n",
        LENGTH.pack(1 << 31),
        LENGTH.pack(60_000) + b"x" * 100,
        dice.randbytes(5000),
    ):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(junk)
    for _ in range(100):  # a port scan
        socket.create_connection(("127.0.0.1", port)).close()
    for _ in range(100):  # half-open connections that stay
        open_ends.append(socket.create_connection(("127.0.0.1", port)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        for _ in range(3000):
            udp.sendto(dice.randbytes(dice.randrange(64)), ("127.0.0.1", port))
    wrong = Client(port)
    wrong.hello("r1", b"wrong but long enough")  # takes nobody's place
    assert wrong.ended()
    for member in members:
        member.go_on()
        no_gap(member)
        assert len({c.epoch for c in member.commits}) == 1, "somebody was disturbed"
    late = Client(port)  # a member can still come in
    assert isinstance(late.next(), Challenge)
    late.close()
    wrong.close()
    for sock in open_ends:
        sock.close()
    text = coordinator.text()
    assert "stranger from 127.0.0.1" in text
    assert text.count("stranger from") <= 3
    assert "Traceback" not in text


def test_a_lost_member_and_its_next_life(start: Start, join: Members) -> None:
    coordinator = start()
    a, b, c = join(coordinator.port, "r0", "r1", "r2")
    a.go_on()
    before = time.monotonic()
    c.stop()
    poll(lambda: a.entered[-1][1].epoch.names() == ("r0", "r1"), "the new epoch")
    print(f"close to NewEpoch in the session: {(a.entered[-1][0] - before) * 1e3:.1f} ms")
    a.go_on()
    b.go_on()
    assert a.commits[-1].contributors == ("r0", "r1")
    (again,) = join(coordinator.port, "r2", fresh=False)
    poll(lambda: a.commits[-1].contributors == ("r0", "r1", "r2"), "r2 contributes again")
    again.go_on()
    for member in (a, b, again):
        no_gap(member)


def test_a_frozen_member_is_taken_out_by_its_heartbeats(start: Start, join: Members) -> None:
    coordinator = start()
    a, _b, c = join(coordinator.port, "r0", "r1", "r2")
    a.go_on()
    poll(lambda: c.heartbeat is not None, "c beats")
    c.freeze()
    poll(lambda: a.entered[-1][1].epoch.names() == ("r0", "r1"), "the new epoch")
    a.go_on()
    poll(lambda: c.ended is not None, "c is told")
    assert c.ended is not None
    assert c.ended[0] == RankExit.RESTART


@pytest.mark.parametrize("record", ["kept", "removed"])
def test_the_coordinator_is_killed_and_comes_back(start: Start, join: Members, tmp_path: Path, record: str) -> None:
    first = start()
    members = join(first.port, "r0", "r1", "r2")
    members[0].go_on(30)
    first.kill()
    poll(lambda: all(m.waits for m in members), "members wait")
    stopped_at = [m.step for m in members]
    if record == "removed":
        (tmp_path / "store" / "record.json").unlink()
    start(port=first.port)
    for member in members:
        member.go_on(30)
        no_gap(member)
    assert max(stopped_at) - min(stopped_at) <= 1
    assert all(m.ended is None for m in members)
    assert {c.epoch.term.number for c in members[0].commits} == {1, 2}


def test_sigterm_leaves_the_members_waiting_for_the_next(start: Start, join: Members) -> None:
    first = start()
    members = join(first.port, "r0", "r1", "r2")
    members[0].go_on()
    assert first.terminate() == 75
    assert "stopped by SIGTERM" in first.text()
    poll(lambda: all(m.waits for m in members), "members wait")
    assert all(m.ended is None for m in members)
    start(port=first.port)
    for member in members:
        member.go_on()


def test_of_two_coordinators_on_one_store_the_older_goes(start: Start, join: Members) -> None:
    old = start()
    members = join(old.port, "r0", "r1", "r2")
    members[0].go_on()
    new = start()  # another port: nobody is connected to it
    assert old.wait() == 75
    assert "newer coordinator" in old.text()
    assert new.process.poll() is None
    poll(lambda: all(m.waits for m in members), "members wait")
    assert all(m.ended is None for m in members)


def test_a_second_coordinator_on_the_same_port_harms_nobody(start: Start, join: Members) -> None:
    old = start()
    members = join(old.port, "r0", "r1", "r2")
    members[0].go_on()
    with pytest.raises(AssertionError, match="Address already in use"):
        start(port=old.port)
    members[0].go_on()
    assert old.process.poll() is None


def test_a_full_disk_stops_epochs_but_not_commits(
    join: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In process, with a store that fails like a full disk; the file system's own answer is in the next test."""
    config = JobConfig(  # a busy machine neither begins without one of the three nor takes one for dead
        job=JOB, replicas=4, min_replicas=3, start_timeout_s=0.1, detection=PATIENT, record_retry_s=0.05
    )
    running = Running(tmp_path / "store", lambda claim: Coordinator(config, claim, time.monotonic()))
    try:
        a, b, c = join(running.port, "r0", "r1", "r2")
        a.go_on()
        real = running.store.write

        def full(record: Record) -> None:
            raise StoreError("record.json: cannot be written: No space left on device")

        monkeypatch.setattr(running.store, "write", full)
        a.go_on()  # commits within the epoch need no record
        (spare,) = join(running.port, "r3", fresh=False)
        poll(lambda: any(e.kind == "record.failed" for e in running.events.after(0)), "it is said")
        a.go_on()
        assert spare.step == 0
        c.stop()
        poll(lambda: any(e.kind == "replica.lost" and e.object == "r2" for e in running.events.after(0)), "the loss")
        time.sleep(0.1)  # in which many steps would be committed
        stuck = a.step
        assert {x.contributors for x in a.commits} == {("r0", "r1", "r2")}
        monkeypatch.setattr(running.store, "write", real)
        a.reach(stuck + 20)
        b.go_on()
        poll(lambda: "r3" in a.commits[-1].contributors, "r3 contributes")
        no_gap(a)
    finally:
        running.stop()


@pytest.mark.root
def test_a_really_full_file_system(start: Start, join: Members, tmp_path: Path) -> None:
    """A tmpfs in a mount namespace of the coordinator's own: it vanishes with the process."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a mount namespace")
    (tmp_path / "store").mkdir()
    mount = f'mount -t tmpfs -o size=64k none {tmp_path / "store"} && exec "$0" "$@"'
    coordinator = start("--record-retry", "100ms", wrap=("unshare", "-m", "sh", "-c", mount))
    a, _b, c = join(coordinator.port, "r0", "r1", "r2")
    a.go_on()
    filler = Path(f"/proc/{coordinator.process.pid}/root{tmp_path}/store/filler")
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(b"x" * 1_000_000)
    a.go_on()
    c.stop()
    poll(lambda: "No space left on device" in coordinator.text(), "it is said")
    with operator(coordinator.port) as client:
        job = client.request("status").job
    assert job is not None
    assert "record" in job.reason
    filler.unlink()
    a.go_on()
    assert a.commits[-1].contributors == ("r0", "r1")


def test_what_an_operator_can_do(start: Start, join: Members) -> None:
    coordinator = start()
    port = coordinator.port
    a, b, c = join(port, "r0", "r1", "r2")
    a.go_on()
    with operator(port) as client:
        job = client.request("status").job
        assert job is not None
        assert (job.name, job.state, job.pid) == (JOB, "running", coordinator.process.pid)
        assert job.contributors == ("r0", "r1", "r2")
        assert {r.name: r.state for r in job.replicas} == dict.fromkeys(("r0", "r1", "r2"), "contributing")

        assert client.request("drain", replica="r9", reason="t").code == "unknown"
        reply = client.request("drain", replica="r1", reason="test", dry_run=True)
        assert reply.code == "ok"
        assert client.request("drain", replica="r1", reason="test").code == "ok"
        poll(lambda: b.ended is not None, "r1 leaves")
        assert b.ended is not None
        assert b.ended[0] == RankExit.DRAINED
        a.go_on()
        assert len({x.step for x in a.commits}) == len(a.commits)
        assert state_of(port, "r1") == "drained"
        assert client.request("rejoin", replica="r1", reason="test").code == "ok"
        (back,) = join(port, "r1", fresh=False)
        poll(lambda: state_of(port, "r1") == "contributing", "r1 is back")
        back.go_on()

        assert client.request("evict", replica="r2", reason="test").code == "ok"
        poll(lambda: c.ended is not None, "r2 is out")
        assert c.ended is not None
        assert c.ended[0] == RankExit.RESTART
        a.go_on()

        events = client.request("events").events
        assert [e.seq for e in events] == list(range(1, len(events) + 1))
        kinds = {e.kind for e in events}
        assert {"replica.draining", "replica.drained"} <= kinds
        assert client.request("finish", reason="enough").code == "ok"
    for member in (a, back):
        poll(lambda m=member: m.ended is not None, "the end")  # type: ignore[misc]
        assert member.ended is not None
        assert member.ended[0] == RankExit.FINISHED
    assert coordinator.wait() == 0


def test_a_member_with_the_wrong_token_ends_with_a_reason(start: Start, join: Members) -> None:
    coordinator = start()
    (member,) = join(coordinator.port, "r0", token=b"another token, long enough")
    poll(lambda: member.ended is not None, "the end")
    assert member.ended is not None
    assert member.ended[0] == RankExit.REFUSED
    assert "same job token" in member.ended[1]


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--replicas", "0"), 2, "at least one replica"),
        (("--nonsense",), 2, "unrecognized arguments"),
        (("--token-file", "/nonexistent"), 2, "No such file"),
        (("--store", "/dev/null"), 1, "not a directory"),
        (("--listen", "192.0.2.1:7600"), 2, "Cannot assign requested address"),
    ],
)
def test_a_bad_start_is_one_clear_line(tmp_path: Path, options: tuple[str, ...], code: int, text: str) -> None:
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text("the token of the job")
    base = ["--job", JOB, "--replicas", "3", "--store", str(tmp_path / "s"), "--token-file", str(tmp_path / "token")]
    done = subprocess.run(
        [sys.executable, "-m", "ftar_core.coordinator", *base, "--listen", "127.0.0.1:0", *options],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("ftar-coordinator: ")
    assert text in done.stderr
    assert not (tmp_path / "s").exists()


def test_a_damaged_record_needs_a_word_of_the_operator(start: Start, join: Members, tmp_path: Path) -> None:
    first = start()
    members = join(first.port, "r0", "r1", "r2")
    members[0].go_on()
    first.kill()
    path = tmp_path / "store" / "record.json"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(AssertionError, match="--record-lost"):
        start(port=first.port)
    start("--record-lost", port=first.port)
    for member in members:
        member.go_on()
        no_gap(member)
