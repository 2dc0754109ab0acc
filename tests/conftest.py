"""What all tests need."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A shell that starts the tests in the background has Ctrl-C ignored, and what they start would inherit that: ftctl
# leaves signals alone that were ignored at its start, so the tests that send one would wait for nothing.
for _number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An agent on a busy machine answers late, and no test fails by that. Those that are about it say `--timeout`.
os.environ.setdefault("FTCTL_TIMEOUT", "30s")

# The same of a single example of hypothesis: that it was slow now and then says nothing about the code.
settings.register_profile("ftctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ftctl")

# One process for these: a lab is most of the machine, and asserts that nothing of it is left there.
ONE_AT_A_TIME = ("lab", "scenarios", "bench")


def place_of(nodeid: str) -> str:
    """What stays together in one process when tests run beside each other: a file, or all that use the machine."""
    path = nodeid.partition("::")[0]
    parts = path.split("/")
    return "machine" if parts[0] == "tests" and parts[1:2] and parts[1] in ONE_AT_A_TIME else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By places. (`--dist loadgroup` would do, but xdist 3.8 does not find its groups under pytest 9.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByPlace(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return place_of(nodeid)

    return ByPlace(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest begins first."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: place_of(item.nodeid) != "machine")
