"""To which incident events belong. For people only: nothing is decided by it.

An agent that acts on a verdict says so with its request. From then on what happens to that replica, and every epoch
that changes because of it, carries the incident's id, until the replica contributes again, or a spare in its place
does. It is kept in memory: a coordinator that was started again hears of it with the agent's next request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ftar_core.wire.messages import OpRequest

MAX_ID = 64


@dataclass(frozen=True)
class Chain:
    """`action`: what was asked for because of the incident. `injected`: a fault of ours is behind it."""

    incident: str
    action: str
    injected: bool


@dataclass(frozen=True)
class Chains:
    """By replica; never more than there are replicas. A value: a record that cannot be written takes changes back."""

    of_replica: dict[str, Chain] = field(default_factory=dict)

    def asked(self, request: OpRequest, action: str = "") -> Chains:
        """The request was granted. One without an incident is the beginning of something else."""
        if not request.incident:
            return self.over(request.replica)
        chain = Chain(request.incident[:MAX_ID], action or request.op, request.injected)
        return Chains({**self.of_replica, request.replica: chain})

    def of(self, replicas: Iterable[str]) -> Chain | None:
        """Of the first of them that has one."""
        return next((self.of_replica[name] for name in replicas if name in self.of_replica), None)

    def stands_in(self, former: str, newcomer: str) -> Chains:
        """`newcomer` is here because `former` is not."""
        chain = self.of_replica.get(former)
        return self.over(newcomer) if chain is None else Chains({**self.of_replica, newcomer: chain})

    def over(self, replica: str) -> Chains:
        return Chains({name: chain for name, chain in self.of_replica.items() if name != replica})
