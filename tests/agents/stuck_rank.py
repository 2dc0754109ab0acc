"""A process that registers as rank RANK of replica r1 at the agent's socket, and then hangs as it is told: gil or lock.

It prints how long its sleep lasted: nobody may cut it short.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

from ftar_core.runtime.agentlink import AgentLink
from ftar_core.runtime.stacks import StackWriter
from ftar_core.wire.agentlink import RankRegister, RankReport


def hold_the_gil(seconds: float) -> None:
    began = time.monotonic()
    ctypes.PyDLL(None).sleep(int(seconds))
    print(f"slept {time.monotonic() - began:.1f}", flush=True)


def wait_for_ever() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def main() -> None:
    socket, rank, how, seconds = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    stacks = StackWriter()
    stacks.start()
    link = AgentLink(
        socket, RankRegister(job="j", replica="r1", rank=rank, pid=os.getpid(), rails=(), stacks=stacks.way)
    )
    link.start()
    link.report(RankReport(state="contributing", step=7, term=1, epoch=1, contributors=("r1",), links=()))
    time.sleep(0.5)  # for the report to be sent
    print("hangs", flush=True)
    if how == "gil":
        hold_the_gil(seconds)
    else:
        wait_for_ever()
    link.close()
    stacks.close()


if __name__ == "__main__":
    main()
