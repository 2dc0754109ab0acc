"""A rank that registers with its agent, tells it who it is, and stands there. FTAR_AGENT is the agent's doing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ftar_core.runtime.agentlink import AgentLink
from ftar_core.wire.agentlink import RankRegister, RankReport

if __name__ == "__main__":
    register = RankRegister(job="none", replica="r0", rank=0, pid=os.getpid(), rails=())
    link = AgentLink(Path(os.environ["FTAR_AGENT"]), register)
    link.start()
    link.report(RankReport(state="contributing", step=7, term=1, epoch=1, contributors=("r0",), links=()))
    signal.pause()
