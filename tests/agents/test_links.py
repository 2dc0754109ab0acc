"""Links of the processes on a node: documents in, views and events out; and real sockets, some of them bad."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from agent_network import Namespace, needs_root
from link_documents import change, document, link, rail
from live_agent import live_agent, until

from agents.host import linksockets
from agents.host.linksockets import LinkAnswer, LinkSocket
from agents.monitors.linkpoller import LinkPoller
from agents.monitors.links import EVENTS, LinkBook, Told

SOCKET = LinkSocket(41, "@ftar-links/100/0")


def answer(data: bytes = b"", problem: str = "", of: LinkSocket = SOCKET, pid: int = 100) -> LinkAnswer:
    return LinkAnswer(of, pid, 0, data, problem)


class Watch:
    """A book that is asked once a second."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.book = LinkBook(self.now)
        self.living = {100}

    def look(self, *answers: LinkAnswer) -> list[Told]:
        self.now += 1.0
        return self.book.take(self.now, answers, lambda pid: pid in self.living)


def test_a_lost_rail_is_one_event_with_its_reason_and_is_told_once() -> None:
    watch = Watch()
    assert watch.look(answer(document([link(1, rail(0), rail(1))]))) == []
    down = link(1, rail(0, "DOWN"), rail(1, active=True), resumes=1)
    told = watch.look(answer(document([down], [change(1)])))
    assert told == [
        Told(
            "link.rail",
            "eth0",
            "process 100 (nccl, rank 3): 64 connections to 10.1.0.2 lost rail0: no carrier (noticed after 2 ms)",
            0.5,
            100,
        )
    ]
    assert watch.look(answer(document([down], [change(1, age_s=1.5)]))) == []
    moved = change(2, "", kind="moved", rail="rail1", links=1, reason="took over from rail0")
    told = watch.look(answer(document([down], [change(1, age_s=2.5), moved])))
    assert [(t.rail, t.reason.partition(": ")[2]) for t in told] == [
        ("eth1", "a connection to 10.1.0.2 sends over rail1 now: took over from rail0")
    ]
    assert watch.book.counters.losses == {("nccl", "rail0"): 64}


def test_a_connection_without_a_rail_that_works_is_told_before_it_is_given_up_and_after_its_process_too() -> None:
    watch = Watch()
    silent = link(1, rail(0, "SILENT"), rail(1, "DOWN"), direction="in")
    watch.look(answer(document([link(1, rail(0), rail(1), direction="in"), link(2, rail(0), rail(1))])))
    dead = change(
        1, "", kind="dead", rail="", links=2, direction="in", reason="rail 0: silent for 1000 ms", detect_ms=-1.0
    )
    told = watch.look(answer(document([silent, link(2, rail(0), rail(1))], [dead])))
    back = change(2, "", kind="back", rail="", links=2, direction="in", reason="", detect_ms=-1.0)
    told += watch.look(answer(document([silent, link(2, rail(0), rail(1))], [dead, back])))
    gone = change(
        3, "", kind="unreachable", rail="", links=1, direction="in", reason="all rails have been dead for 30000 ms"
    )
    told += watch.look(answer(document([silent, link(2, rail(0), rail(1))], [dead, back, gone])))
    never = change(4, reason="the peer says: no carrier", links=1, detect_ms=-1.0)
    told += watch.look(answer(document([silent, link(2, rail(0), rail(1))], [dead, back, gone, never])))
    watch.living.clear()
    told += watch.look()
    assert [t.reason.partition("(nccl, rank 3)")[2] for t in told] == [
        ": 2 connections from 10.1.0.2: no rail works: rail 0: silent for 1000 ms",
        ": 2 connections from 10.1.0.2: a rail works again",
        ": a connection from 10.1.0.2: all rails have been dead for 30000 ms; given up",
        ": a connection to 10.1.0.2 lost rail0: the peer says: no carrier",
        " ended; when last seen, 1 of its 2 connections had no rail that works",
    ]
    assert {t.kind for t in told} == {"link.peer", "link.rail", "link.process"}


def test_a_change_that_may_still_grow_waits_and_is_told_at_the_latest_when_its_process_is_gone() -> None:
    watch = Watch()
    watch.look(answer(document()))
    assert watch.look(answer(document([], [change(1, age_s=0.05, links=10)]))) == []
    (told,) = watch.look(answer(document([], [change(1, age_s=1.05, links=64)])))
    assert "64 connections" in told.reason
    assert watch.look(answer(document([], [change(1, age_s=2), change(2, "HOLD", age_s=0.01)]))) == []
    watch.living.clear()
    assert [(t.kind, t.reason.partition("(nccl, rank 3)")[2]) for t in watch.look()] == [
        ("link.rail", ": 64 connections to p1 have rail0 back, in hold-down: no carrier"),
        ("link.process", " ended"),
    ]
    assert watch.look() == []


def test_what_happened_before_the_agent_is_told_by_the_state_that_is_left() -> None:
    watch = Watch()
    old = change(7, age_s=3600.0)
    down = link(1, rail(0, "DOWN", reason="no carrier", since_s=3600.0), rail(1, active=True))
    (told,) = watch.look(answer(document([down], [old])))
    assert told.reason == "process 100 (nccl, rank 3): 1 of 1 connections are without rail0: no carrier"
    (told,) = watch.look(answer(document([down], [old, change(8, "HOLD")])))
    assert "in hold-down" in told.reason


def test_changes_that_came_too_fast_are_counted_and_a_storm_is_cut() -> None:
    watch = Watch()
    watch.look(answer(document()))
    storm = [change(seq, age_s=0.9, reason=f"reason {seq}") for seq in range(101, 357)]
    told = watch.look(answer(document([], storm)))
    assert told[0].reason.endswith("100 changes came too fast to be told")
    assert len(told) == EVENTS + 1
    assert told[-1].reason == f"{1 + 256 - EVENTS} more changes of links within one look: ftctl links"
    assert watch.look(answer(document([], storm))) == []


def test_a_process_that_is_silent_keeps_its_view_and_is_told_after_a_while_once() -> None:
    watch = Watch()
    watch.look(answer(document([link(1, rail(0), rail(1))])))
    told = [t.reason for _ in range(10) for t in watch.look(answer(problem="no answer within 0.8 s"))]
    assert told == ["process 100 (nccl, rank 3) does not answer: no answer within 0.8 s; is it stopped?"]
    (view,) = watch.book.views(watch.now)
    assert (view.links, view.silent_s, view.note) == (1, 10.0, "no answer within 0.8 s")
    (told_again,) = watch.look(answer(document()))
    assert told_again.reason.endswith("answers again")


def test_a_process_of_another_version_is_one_warning() -> None:
    watch = Watch()
    told = [t for _ in range(3) for t in watch.look(answer(document(schema=3)))]
    assert [t.kind for t in told] == ["link.unreadable"]
    assert "schema 3 and this version knows 2" in told[0].reason
    assert watch.book.views(watch.now)[0].note.startswith("it speaks schema 3")


def test_a_socket_that_a_fork_inherited_from_a_dead_process_is_nobody() -> None:
    watch = Watch()
    watch.living.clear()
    assert watch.look(answer(problem="no answer within 0.8 s")) == []
    assert watch.book.views(watch.now) == []


def test_totals_by_rail_name_the_worst_and_where_the_data_went() -> None:
    watch = Watch()
    down = rail(0, "DOWN", reason="no carrier", since_s=3.0, flaps=2, detect_ms=2.5)
    hold = rail(0, "HOLD", hold_left_ms=1500.0, flaps=1)
    links = [
        link(1, down, rail(1, active=True), resumes=1),
        link(2, hold, rail(1, active=True), resumes=2),
        link(3, rail(0, active=True), rail(1), peer="p2", direction="in"),
    ]
    watch.look(answer(document(links)))
    (view,) = watch.book.views(watch.now)
    assert (view.links, view.peers, view.resumes) == (3, 2, 3)
    first, second = view.rails
    assert (first.rail, first.device, first.up, first.links) == ("rail0", "eth0", 1, 3)
    assert first.states == {"DOWN": 1, "HOLD": 1, "UP": 1}
    assert (first.state, first.reason, first.since_s, first.detect_ms) == ("DOWN", "no carrier", 3.0, 2.5)
    assert (first.active, first.moved, first.flaps, first.hold_left_s) == (1, {"rail1": 2}, 2, 1.5)
    assert (second.up, second.active, second.moved) == (3, 2, {})
    rows = watch.book.rows(rail="eth0")
    assert [(r.peer, r.direction, r.rail, r.links, r.up, r.state) for r in rows] == [
        ("p1", "out", "rail0", 2, 0, "DOWN"),
        ("p2", "in", "rail0", 1, 1, "UP"),
    ]
    assert [r.link for r in watch.book.rows(each=True, state="hold")] == [2]
    assert watch.book.rows(pid=7) == []


def test_counters_go_up_only_and_their_labels_are_bounded() -> None:
    watch = Watch()
    watch.look(answer(document([link(1, rail(0, bytes=500)), link(2, rail(0, bytes=500))])))
    watch.look(answer(document([link(1, rail(0, bytes=700), resumes=2)])))  # 2 has closed, 1 went on
    watch.look(answer(document([link(3, rail(0, bytes=5))])))
    counters = watch.book.counters
    assert counters.bytes[("nccl", "rail0")] == 500 + 500 + 200 + 5
    assert counters.resumes == {"nccl": 2}
    for number in range(100):
        port = {"name": f"x{number}", "device": "", "address": "", "carrier": True}
        watch.look(answer(document([link(1, rail(0, bytes=1000 * number))], rails=[port])))
    assert len(counters.bytes) <= 65
    assert counters.bytes[("nccl", "other")] > 0


def test_what_a_process_says_cannot_rewrite_a_terminal() -> None:
    watch = Watch()
    watch.look(answer(document(rank="\x1b[2J" + "7" * 1000)))
    (told,) = watch.look(answer(document([], [change(1, reason="\x1b]0;x\x07", rail="\n")], rank="\x1b[2J")))
    assert "\x1b" not in told.reason + told.rail
    assert "\x1b" not in str(watch.book.views(watch.now))


@pytest.mark.parametrize(("rank", "told"), [(100, []), (7, ["link.rail"])])
def test_what_a_registered_rank_tells_its_coordinator_is_not_told_twice(
    rank: int, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: Any = SimpleNamespace(name="node1", ranks=lambda: [SimpleNamespace(pid=rank)], faults_by_nic=dict)
    heard: list[str] = []
    poller = LinkPoller(parts, 1.0, lambda kind, *_rest, **_more: heard.append(kind))
    says = [document(), document([link(1, rail(0))], [change(1, age_s=0.2)])]
    monkeypatch.setattr(linksockets, "find", lambda: [SOCKET])
    monkeypatch.setattr(linksockets, "read_all", lambda _sockets, _deadline_s: [answer(says.pop(0))])
    poller._book = LinkBook(0.0)
    poller._look()
    poller._look()
    assert heard == told
    assert [view.pid for view in poller.views()] == [100]


# --- real sockets -------------------------------------------------------------------------------------------------


@contextmanager
def speaker(number: int, says: bytes | None, times: int = 1000) -> Iterator[LinkSocket]:
    """A listening status socket of this process that says `says` to everybody; None: accepts nobody, as if stopped."""
    name = f"ftar-links/{os.getpid()}/{number}"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("\0" + name)
        sock.listen(8)

        def serve() -> None:
            for _ in range(times):
                try:
                    peer, _ = sock.accept()
                except OSError:
                    return
                with peer:
                    try:
                        peer.sendall(says or b"")
                    except OSError:
                        continue

        if says is not None:
            threading.Thread(target=serve, daemon=True).start()
        found = [one for one in linksockets.find() if one.name == "@" + name]
        assert len(found) == 1
        yield found[0]
        sock.shutdown(socket.SHUT_RDWR)


def test_all_are_read_at_once_and_one_that_is_stopped_holds_up_nobody() -> None:
    good = document([link(1, rail(0))])
    with ExitStack() as stack:
        ones = [stack.enter_context(speaker(900 + n, says)) for n, says in enumerate([good, None, b"{", good])]
        huge = stack.enter_context(speaker(910, b"x" * (4 * 2**20 + 10)))
        begun = time.monotonic()
        answers = linksockets.read_all([*ones, huge], 3.0)
        assert time.monotonic() - begun < 60
        assert [a.problem for a in answers] == [
            "",
            "no answer within 3 s",
            "its answer ended early",
            "",
            "says more than 4194304 bytes",
        ]
        assert answers[0].data == good
        assert {a.pid for a in answers} == {os.getpid()}
    gone = linksockets.read_all(ones, 0.5)
    assert all(a.problem == "it has just closed its socket" for a in gone)


@needs_root
def test_an_agent_shows_the_links_of_its_network_namespace() -> None:
    space = Namespace()
    try:
        with space.entered(), ExitStack() as stack:
            agent = stack.enter_context(live_agent(watch_links=True, poll_s=0.2)).start()
            first = stack.enter_context(speaker(0, document([link(1, rail(0), rail(1))])))
            assert first.name.startswith("@ftar-links/")

            def processes() -> list[dict[str, Any]]:
                found: list[dict[str, Any]] = agent.get("/v1/node").json()["link_processes"]
                return found

            until(lambda: bool(processes()), "the process is seen")
            (seen,) = processes()
            assert (seen["pid"], seen["kind"], seen["rank"], seen["links"]) == (os.getpid(), "nccl", "3", 1)
            assert [r["states"] for r in seen["rails"]] == [{"UP": 1}, {"UP": 1}]
            rows = agent.get("/v1/links?rail=eth1").json()
            assert [row["address"] for row in rows["links"]] == ["10.1.1.2"]
            assert agent.get("/v1/links?limit=1").json()["left_out"] == 1
            assert agent.get("/v1/links?state=DOWN&each=true").json()["links"] == []
            assert agent.get("/v1/links", role="nobody").status_code == 401
            for bad in ("limit=0", "limit=1000000", "pid=x", f"rail={'r' * 100}"):
                response = agent.get(f"/v1/links?{bad}")
                assert response.status_code == 422
                assert response.json()["reason"]
            metrics = agent.get("/metrics").text
            assert 'ftctl_links{kind="nccl",rail="rail0",state="UP"} 1.0' in metrics
            assert 'ftctl_link_bytes_total{kind="nccl",rail="rail1"} 1000.0' in metrics
            assert "ftctl_link_hold_down_seconds" in metrics
        # The namespace was left, and with it the socket; the agent has ended as well.
    finally:
        space.close()
