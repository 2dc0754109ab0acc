"""A plugin in the test's own process, on two loopback rails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ftar_core.ncclenv import plugin_path

from .abi import Plugin
from .rig import LOOPBACK, QUICK


@pytest.fixture(autouse=True)
def loopback_rails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTAR_NET_RAILS", LOOPBACK)
    monkeypatch.setenv("FTAR_NET_OPTIONS", QUICK)
    monkeypatch.setenv("FTAR_NET_TIMEOUT_S", "5")
    monkeypatch.delenv("FTAR_TOKEN_FILE", raising=False)


@pytest.fixture
def impatient(loopback_rails: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that wait until a connection is given up. Before `plugin` in a test's arguments."""
    monkeypatch.setenv("FTAR_NET_TIMEOUT_S", "1")


@pytest.fixture
def plugin(loopback_rails: None) -> Iterator[Plugin]:
    """v12 in this process: both ends of every connection."""
    made = Plugin(plugin_path(), 12)
    yield made
    made.close()
