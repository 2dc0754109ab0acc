"""`ftctl dump`: what a process is doing, seen by the agent of its node, without stopping, resuming or waking it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_agent import LiveAgent, live_agent, until

from agents.api.evidence import RankStacks
from agents.evidence import as_text, in_a_sentence, main_frame
from agents.host.threads import Looked, Thread

PROGRAM = Path(__file__).with_name("stuck_rank.py")
DUMP = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3/threading.py", line 324 in wait
  File "/usr/lib/python3/threading.py", line 10 in _bootstrap

Thread 0x00007f2 (most recent call first):
  File "/home/x/train.py", line 44 in happen
  File "/home/x/train.py", line 90 in main
"""


@pytest.fixture(scope="module")
def agent() -> Iterator[LiveAgent]:
    with tempfile.TemporaryDirectory(prefix="ft-ranks-") as short:
        with live_agent(ranks_socket=f"{short}/ranks.sock") as agent:
            yield agent.start()


@contextlib.contextmanager
def stuck(agent: LiveAgent, how: str, *, rank: int = 0, seconds: float = 2) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, str(PROGRAM), agent.settings["ranks_socket"], str(rank), how, str(seconds)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        yield process
    finally:
        process.kill()
        process.wait(60)


def dump(agent: LiveAgent, **wish: Any) -> list[RankStacks]:
    answer = agent.post("/v1/replicas/r1/stacks", wish, role="operator")
    assert answer.status_code == 200, answer.text
    return [RankStacks.model_validate(one) for one in answer.json()["ranks"]]


def test_the_stacks_of_a_process_that_holds_the_gil_and_its_sleep_goes_on(agent: LiveAgent) -> None:
    with stuck(agent, "gil", seconds=3) as process:
        (seen,) = dump(agent)
        assert "in hold_the_gil" in seen.python, seen
        assert "its main thread at stuck_rank.py:" in seen.summary
        assert seen.pid == process.pid
        names = {thread.name for thread in seen.threads}
        assert len(seen.threads) >= 2, names
        (again,) = dump(agent)
        assert again.python.count("hold_the_gil") == 1, "the second one is not behind the first"
        assert process.stdout is not None
        assert float(process.stdout.readline().split()[1]) >= 2.9, "looking at it woke it up"


def test_a_deadlock_is_seen_where_it_is(agent: LiveAgent) -> None:
    with stuck(agent, "lock") as process:
        (seen,) = dump(agent)
        assert seen.summary.startswith("waiting")
        assert "in wait_for_ever" in seen.summary
        assert process.poll() is None


def test_a_stopped_process_is_said_to_be_stopped_and_stays_so(agent: LiveAgent) -> None:
    with stuck(agent, "lock") as process:
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: state_of(process.pid) == "T", "it is stopped")
        (seen,) = dump(agent)
        assert seen.state == "T"
        assert seen.summary == "stopped by a signal (state T)"
        assert "not woken up" in seen.note
        assert not seen.python
        assert seen.threads
        assert state_of(process.pid) == "T"


def test_one_rank_of_several(agent: LiveAgent) -> None:
    with stuck(agent, "lock", rank=0), stuck(agent, "lock", rank=1) as second:
        assert [one.rank for one in dump(agent)] == [0, 1]
        assert [one.pid for one in dump(agent, rank=1)] == [second.pid]
        missing = agent.post("/v1/replicas/r1/stacks", {"rank": 7}, role="operator")
        assert missing.status_code == 404
        assert "no process of it on node1" in missing.json()["reason"]


def test_who_may_ask_and_what(agent: LiveAgent) -> None:
    assert agent.post("/v1/replicas/r1/stacks", {}, role="viewer").status_code == 403
    assert agent.post("/v1/replicas/r1/stacks", {"rank": -1}, role="operator").status_code == 422
    assert agent.post("/v1/replicas/r1/stacks", {"ranks": 1}, role="operator").status_code == 422
    assert agent.post("/v1/replicas/..%2F/stacks", {}, role="operator").status_code == 404


def test_a_process_without_a_handler_is_never_signalled(agent: LiveAgent) -> None:
    """What it registered with is not true (any more): the signal would be its end."""
    code = (
        "import os, sys, time; from pathlib import Path; from ftar_core.runtime.agentlink import AgentLink;"
        "from ftar_core.wire.agentlink import RankRegister, StackWay;"
        "AgentLink(Path(sys.argv[1]), RankRegister(job='j', replica='r1', rank=0, pid=os.getpid(), rails=(),"
        " stacks=StackWay(signal=41, thread=os.getpid(), file=0))).start(); time.sleep(0.5); print('up', flush=True);"
        "time.sleep(60)"
    )
    arguments = [sys.executable, "-c", code, agent.settings["ranks_socket"]]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        (seen,) = dump(agent)
        assert "does not answer to signal 41" in seen.note
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(60)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# --- pure ----------------------------------------------------------------------------------------------------------


def test_the_main_thread_is_the_last_one() -> None:
    assert main_frame(DUMP) == "train.py:44 in happen"
    assert main_frame("") == ""
    assert main_frame("Thread 0x1 (most recent call first):\n  <no Python frame>\n") == ""


@pytest.mark.parametrize(
    ("looked", "sentence"),
    [
        (
            Looked(7, "S", threads=(Thread(7, "python", "S", "futex_wait", ""),), python=DUMP),
            "waiting, in the kernel's futex_wait, its main thread at train.py:44 in happen",
        ),
        (Looked(7, "T", note="it is not woken up"), "stopped by a signal (state T)"),
        (
            Looked(7, "D", threads=(Thread(7, "python", "D", "nfs_wait", ""),), note="it did not answer"),
            "in an uninterruptible wait (disk, or a driver), in the kernel's nfs_wait, it did not answer",
        ),
        (Looked(7, "", note="the process is gone"), "the process is gone"),
    ],
)
def test_a_sentence_says_where_it_is(looked: Looked, sentence: str) -> None:
    assert in_a_sentence(looked) == sentence


def test_an_event_begins_with_the_sentence_and_is_bounded() -> None:
    one = RankStacks(replica="r1", rank=3, node="n1", pid=7, time=0.0, state="S", summary="waiting", python=DUMP * 99)
    text = as_text([one], 1000)
    assert text.splitlines()[0] == "rank 3 (pid 7 on n1) is waiting"
    assert len(text.encode()) <= 1000
