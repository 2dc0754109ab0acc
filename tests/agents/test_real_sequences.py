"""Whatever happens to a real node in whatever order, no fault is left over and nothing of anybody else's is touched.

Fifty sequences, eight beside each other (sequence_players.py). The soak test plays SEQUENCES=N others (50), new ones
each time. SEQUENCE_SEED=S plays that one again; in the soak test, those from S on.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from agent_network import needs_root

from agents.host.nft import NftProgram

pytestmark = [pytest.mark.root, needs_root]

WANTED = os.environ.get("SEQUENCES", "")
SEED = os.environ.get("SEQUENCE_SEED", "")
BESIDE = 8


@pytest.mark.timeout(900)
def test_fifty_sequences_leave_nothing_behind() -> None:
    _play(int(SEED) if SEED else 1, 1 if SEED else 50)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_sequences_leave_nothing_behind() -> None:
    _play(int(SEED) if SEED else secrets.randbelow(2**31), int(WANTED or 50))


def _play(first: int, count: int) -> None:
    if reason := NftProgram().unsupported():
        pytest.skip(reason)
    players = Path(__file__).parent / "sequence_players.py"
    command = [sys.executable, str(players), str(first), str(count), str(BESIDE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                print(line, end="", flush=True)
        finally:
            process.terminate()  # only if we were interrupted; it cleans up
        assert process.wait() == 0, "".join(said[-200:])
    assert len(said) == count
