"""Halts all faults of a run when the fleet is no longer well; what is well, the playbook says."""

from __future__ import annotations

from agents.api.breaker import Breaker, Share
from agents.api.halt import HaltAnswer, HaltRequest
from ftctl.client.cluster import Agents, Snapshot
from ftctl.playbook.objectives import BreakerLimits


def shares(snapshot: Snapshot, limits: BreakerLimits) -> tuple[Share, Share]:
    """Replicas that contribute and nodes that answer. A job of which nobody can tell counts as not known."""
    job = snapshot.job if snapshot.job is not None and snapshot.job.state not in ("finished", "stopped") else None
    good = sum(replica.state == "contributing" for replica in job.replicas) if job is not None else 0
    wanted = job.replicas_wanted if job is not None else 0
    nodes = len(snapshot.nodes)
    return (
        Share("replicas contribute", good, wanted, limits.replicas_percent),
        Share("nodes answer", len(snapshot.views()), nodes, limits.nodes_percent),
    )


class RunBreaker:
    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._breaker = Breaker()

    def look(self, now: float, snapshot: Snapshot, slower: float) -> str:
        """Why all is to be halted; empty: it is not. `now`: monotonic; `slower`: than a machine of its own."""
        return self._breaker.look(now, shares(snapshot, self._limits), self._limits.after * slower)


async def halt_all(agents: Agents, why: str) -> str:
    """On every node, with the reason; says how many were reached."""
    request = HaltRequest(reason=why)
    answers = await agents.each(lambda client: client.halt("halt", request), within_s=agents.timeout_s)
    reached = [name for name, answer in answers.items() if isinstance(answer, HaltAnswer)]
    missed = [name for name in answers if name not in reached]
    rest = f"; not on {', '.join(missed[:5])}{' ...' if len(missed) > 5 else ''}" if missed else ""
    return f"faults are halted on {len(reached)} of {len(answers)} nodes{rest}"
