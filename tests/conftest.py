"""What all tests need."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# A shell that starts the tests in the background has Ctrl-C ignored, and what they start would inherit that: ftctl
# leaves signals alone that were ignored at its start, so the tests that send one would wait for nothing.
for _number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An agent on a busy machine answers late, and no test fails by that. Those that are about it say `--timeout`.
os.environ.setdefault("FTCTL_TIMEOUT", "30s")

TESTS = Path(__file__).parent
# One process for these: a lab is most of the machine, and asserts that nothing of it is left there.
ONE_AT_A_TIME = ("lab", "scenarios", "bench")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """When tests run beside each other: what stays together in one process. The longest begins first."""
    if config.pluginmanager.hasplugin("xdist") and config.getoption("dist", "no") == "loadgroup":
        places = {item: item.path.relative_to(TESTS).parts for item in items}
        items.sort(key=lambda item: places[item][0] not in ONE_AT_A_TIME)
        for item, place in places.items():
            item.add_marker(pytest.mark.xdist_group("machine" if place[0] in ONE_AT_A_TIME else "/".join(place)))
