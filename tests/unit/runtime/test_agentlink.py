"""A rank reports to its agent: the agent comes late, goes away, comes back, does not read. Training never notices."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftar_core.runtime import agentlink
from ftar_core.runtime.agentlink import AgentLink
from ftar_core.wire.agentlink import ArmBreakpoints, FromRank, RankRegister, RankReport, ToRank, from_rank
from ftar_core.wire.codec import FrameParser, encode

REGISTER = RankRegister(job="demo", replica="r0", rank=0, pid=os.getpid(), rails=("lo",))


def report(step: int) -> RankReport:
    return RankReport(state="contributing", step=step, term=1, epoch=1, contributors=("r0",), links=())


class Agent:
    """The agent's end of the socket."""

    def __init__(self, path: Path) -> None:
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.server.bind(str(path))
        self.server.listen()
        self.server.settimeout(60)
        self.path = path
        self.parser: FrameParser[FromRank] = FrameParser(from_rank)
        self.got: list[FromRank] = []

    def accept(self) -> None:
        self.sock, _ = self.server.accept()
        self.sock.settimeout(60)

    def until(self, step: int) -> None:
        while not any(isinstance(m, RankReport) and m.step == step for m in self.got):
            data = self.sock.recv(65536)
            assert data, "the rank closed the connection"
            self.got += self.parser.feed(data)

    def close(self) -> None:
        self.server.close()
        if hasattr(self, "sock"):
            self.sock.close()
        self.path.unlink()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agentlink, "RECONNECT_S", 0.02)
    monkeypatch.setattr(agentlink, "REPEAT_S", 0.05)


@pytest.fixture
def link(tmp_path: Path, quick: None) -> Iterator[AgentLink]:
    link = AgentLink(tmp_path / "ranks.sock", REGISTER)
    link.start()
    yield link
    link.close()


def test_agent_comes_late_goes_and_comes_back(link: AgentLink, tmp_path: Path) -> None:
    link.report(report(1))
    agent = Agent(tmp_path / "ranks.sock")
    agent.accept()
    agent.until(1)
    assert agent.got[0] == REGISTER
    link.report(report(2))
    agent.until(2)
    agent.close()

    link.report(report(3))
    agent = Agent(tmp_path / "ranks.sock")
    agent.accept()
    agent.until(3)
    assert agent.got[0] == REGISTER
    link.report(report(4))
    link.close()
    agent.until(4)
    agent.close()


def test_an_agent_that_does_not_read_costs_nothing(
    link: AgentLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agentlink, "SEND_TIMEOUT_S", 0.05)
    agent = Agent(tmp_path / "ranks.sock")
    started = time.monotonic()
    for step in range(20_000):
        link.report(report(step))
    assert time.monotonic() - started < 60, "20,000 times SEND_TIMEOUT_S are 1,000 s"
    link.close()
    agent.close()


def test_no_agent_configured() -> None:
    link = AgentLink(None, REGISTER)
    link.start()
    link.report(report(1))
    link.close()


def test_what_an_agent_asks_for_is_heard_by_a_rank_that_allows_it_and_damage_stops_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agentlink, "REPEAT_S", 0.05)
    agent = Agent(tmp_path / "agent.sock")
    heard: list[ToRank] = []
    link = AgentLink(agent.path, REGISTER, heard.append)
    try:
        link.start()
        agent.accept()
        link.report(report(1))
        agent.until(1)
        agent.sock.sendall(encode(ArmBreakpoints(text="update,step=9")))
        wait_until(lambda: heard == [ArmBreakpoints(text="update,step=9")])
        agent.sock.sendall(b"\xff" * 64)
        link.report(report(2))
        agent.until(2)
        agent.sock.sendall(encode(ArmBreakpoints(text="update,step=10")))
        link.report(report(3))
        agent.until(3)
    finally:
        link.close()
        agent.close()
    assert len(heard) == 1


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
