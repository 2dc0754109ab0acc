"""The coordinator hears of a rank's progress, whatever Python is doing."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator

import pytest

from ftar_core.native import core
from ftar_core.wire.heartbeat import Beat, Phase, TeamBeat, parse, rank_interval_ms


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6])
def coordinator(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with socket.socket(request.param, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1" if request.param == socket.AF_INET else "::1", 0))
        sock.settimeout(60)
        yield sock


def receive(sock: socket.socket) -> Beat:
    return parse(sock.recv(1000))


def drain(sock: socket.socket) -> int:
    """How many beats were waiting."""
    sock.setblocking(False)
    beats = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            receive(sock)
            beats += 1
    return beats


def test_a_phase_that_lasts_longer_than_its_budget_says_so_by_itself(coordinator: socket.socket) -> None:
    host, port = coordinator.getsockname()[:2]
    heartbeat = core.Heartbeat(host, port, b"c" * 16, 0, 5)
    try:
        heartbeat.progress(Phase.CHECKPOINT, 7, 0, 0)
        heartbeat.budget(0.05)
        seen = []
        while not seen or not seen[-1].overdue:
            seen.append(receive(coordinator))
        assert (seen[-1].phase, seen[-1].step) == (Phase.CHECKPOINT, 7)
        heartbeat.budget(-1)
        while receive(coordinator).overdue:
            pass
    finally:
        heartbeat.stop()


def test_beats_say_what_the_rank_said_last(coordinator: socket.socket) -> None:
    host, port = coordinator.getsockname()[:2]
    heartbeat = core.Heartbeat(host, port, b"c" * 16, 3, 5)
    try:
        first = receive(coordinator)
        assert (first.rank, first.cookie, first.phase, first.seq) == (3, b"c" * 16, Phase.STARTUP, 1)
        heartbeat.progress(Phase.REDUCE, 41, 7, 5)
        beats = [receive(coordinator) for _ in range(5)]
        last = beats[-1]
        assert (last.phase, last.step, last.produced, last.reduced) == (Phase.REDUCE, 41, 7, 5)
        assert [b.seq for b in beats] == list(range(2, 7))
        heartbeat.retarget(host, port, b"d" * 16, 5)
        while receive(coordinator).cookie != b"d" * 16:
            pass
    finally:
        heartbeat.stop()
    drain(coordinator)
    coordinator.settimeout(0.05)
    with pytest.raises(TimeoutError):
        receive(coordinator)
    heartbeat.stop()


def test_a_held_gil_stops_no_heartbeat() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        heartbeat = core.Heartbeat("localhost", sock.getsockname()[1], b"c" * 16, 0, 5)
        try:
            sock.settimeout(60)
            receive(sock)
            # A regular expression that backtracks keeps the GIL until it is through.
            re.match(r"(a+)+$", "a" * 22 + "b")
            assert drain(sock) >= 3  # an idle machine sends some 50
        finally:
            heartbeat.stop()


def test_a_name_that_cannot_be_resolved_is_tried_again_not_fatal() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(60)
        heartbeat = core.Heartbeat("no.such.host.invalid", 9, b"c" * 16, 0, 5)
        try:
            heartbeat.retarget("127.0.0.1", sock.getsockname()[1], b"e" * 16, 5)
            assert receive(sock).cookie == b"e" * 16
        finally:
            heartbeat.stop()


def test_a_leader_s_beat_tells_who_is_quiet_and_who_has_produced_least(coordinator: socket.socket) -> None:
    host, port = coordinator.getsockname()[:2]
    leader = core.Heartbeat(host, port, b"c" * 16, 0, 5)
    leader.progress(Phase.REDUCE, 41, 7, 5)
    ranks: list[core.Heartbeat] = []
    try:
        assert receive(coordinator).team is None
        gathered = leader.gather(host, b"t" * 16, 4)
        assert receive(coordinator).team is None, "nobody has beaten yet"
        stranger = core.Heartbeat(host, gathered, b"x" * 16, 1, 5)
        beyond = core.Heartbeat(host, gathered, b"t" * 16, 4, 5)
        ranks += [stranger, beyond, *(core.Heartbeat(host, gathered, b"t" * 16, rank, 5) for rank in (1, 2, 3))]
        for rank in ranks[2:]:
            rank.progress(Phase.REDUCE, 41, 7, 5)
        ranks[3].progress(Phase.FORWARD, 41, 3, 1)

        def told(wanted: Callable[[TeamBeat], bool]) -> TeamBeat:
            while True:
                beat = receive(coordinator)
                if beat.team is not None and wanted(beat.team):
                    assert (beat.rank, beat.phase, beat.step, beat.produced) == (0, Phase.REDUCE, 41, 7)
                    return beat.team

        team = told(lambda t: t.heard == 3 and t.step == 41 and t.least == 2)
        assert (team.sharing, team.phase, team.produced, team.reduced) == (1, Phase.FORWARD, 3, 1)
        ranks[4].stop()
        team = told(lambda t: t.quietest == 3 and t.silent_ms >= 300)
        ranks[3].progress(Phase.REDUCE, 41, 7, 5)
        team = told(lambda t: t.least == 0)
        assert (team.sharing, team.produced, team.reduced) == (4, 7, 5)
    finally:
        for one in (leader, *ranks):
            one.stop()
    with pytest.raises(RuntimeError, match="no socket on"):
        leader.gather("192.0.2.1", b"t" * 16, 2)
    with pytest.raises(ValueError, match="2 to 65536 ranks"):
        leader.gather("127.0.0.1", b"t" * 16, 1)


def test_many_ranks_beat_to_their_leader_more_slowly_within_reason() -> None:
    assert [rank_interval_ms(100, ranks) for ranks in (2, 200, 640, 5000)] == [100, 100, 300, 300]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("", 1, b"c" * 16, 0, 5), "host is empty"),
        (("h", 0, b"c" * 16, 0, 5), "port 0"),
        (("h", 1, b"c", 0, 5), "cookie has 1 bytes"),
        (("h", 1, b"c" * 16, -1, 5), "rank"),
        (("h", 1, b"c" * 16, 0, 0), "interval of 0"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[str, int, bytes, int, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        core.Heartbeat(*arguments)
