"""Machines for the agent's tests: one in memory, and one in a real network namespace."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_links import FakeClock, FakeLinks, FakeNft, FakeQdiscs

from agents.host.machine import Machine
from agents.host.sysfs import Sysfs


@pytest.fixture
def links() -> FakeLinks:
    """Two healthy rails and a management NIC."""
    links = FakeLinks()
    for name in ("rail0", "rail1", "mgmt0"):
        links.add(name)
    return links


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def machine(links: FakeLinks, clock: FakeClock, tmp_path: Path) -> Machine:
    return Machine(
        scratch=tmp_path / "scratch",
        links=links,
        sysfs=Sysfs(tmp_path / "sys"),
        clock=clock,
        netns=1,
        net_admin=True,
        nft=FakeNft(),
        qdiscs=FakeQdiscs(),
        rails=("rail0", "rail1"),
    )


@pytest.fixture
def ledger_directory(tmp_path: Path) -> Path:
    return tmp_path / "ledger"
