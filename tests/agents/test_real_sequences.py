"""Whatever happens to a real node in whatever order, no fault is left over and nothing of anybody else's is touched.

Some sequences by default, 50 in `make soak`; SEQUENCES=N gives another number, of other sequences each time, and
SEQUENCE_SEED=S the first of them again.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from random import Random

import pytest
from agent_network import needs_root
from real_sequences import RealNode, Zygote

from agents.host.nft import NftProgram

pytestmark = [pytest.mark.root, needs_root]

WANTED = os.environ.get("SEQUENCES", "")
SEED = os.environ.get("SEQUENCE_SEED", "")
STEPS = 8


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    if reason := NftProgram().unsupported():
        pytest.skip(reason)
    zygote = Zygote()
    yield zygote
    zygote.close()


def test_some_sequences_leave_nothing_behind(zygote: Zygote) -> None:
    seed = int(SEED) if SEED else 1
    _sequences(zygote, 1 if SEED and not WANTED else 4, seed)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_sequences_leave_nothing_behind(zygote: Zygote) -> None:
    _sequences(zygote, int(WANTED or 50), int(SEED) if SEED else secrets.randbelow(2**31))


def _sequences(zygote: Zygote, count: int, seed: int) -> None:
    kinds: set[str] = set()
    for number in range(seed, seed + count):
        begun = time.monotonic()
        node = RealNode(zygote, Random(number))
        try:
            _play(node)
        except BaseException:
            told = "\n  ".join(node.done)
            print(f"\nSEQUENCE_SEED={number}:\n  {told}\nthe agent's log:\n{node.text()}")
            raise
        finally:
            node.close()
        kinds |= {fault.kind for fault in node.faults.values()}
        print(f"sequence {number}: {len(node.faults)} faults, {time.monotonic() - begun:.1f} s", flush=True)
    assert kinds, "not one fault was ever in force"


def _play(node: RealNode) -> None:
    rng = node.rng
    node.start_agent()
    node.start_controller()
    for _ in range(STEPS):
        what = rng.choices(
            (
                "inject",
                "inject and die",
                "revert",
                "kill agent",
                "end agent",
                "freeze",
                "kill watchdog",
                "kill controller",
                "pause",
                "administrator",
            ),
            (8, 3, 2, 1, 1, 1, 1, 1, 3, 2),
        )[0]
        said = what
        if node.pid is None and what not in ("pause", "administrator", "kill controller"):
            node.start_agent()
            said = f"start agent, {what}"
        if what == "inject":
            said = node.inject()
        elif what == "inject and die":
            said = node.inject(rng.uniform(0, 0.06))
        elif what == "revert":
            said = node.revert()
        elif what == "kill agent":
            node.kill_agent()
        elif what == "end agent":
            node.end_agent()
        elif what == "freeze":
            node.freeze()
        elif what == "kill watchdog":
            node.kill_watchdog()
        elif what == "kill controller":
            node.kill_controller()
        elif what == "administrator":
            said = node.administrator()
        else:
            time.sleep(rng.uniform(0.1, 1.2))
        node.done.append(said)
        node.check()
        if rng.random() < 0.3:
            node.start_controller()
    node.done.append(node.finish())
