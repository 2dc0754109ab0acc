"""The faults there are, as data: what both sides must agree on before anything is sent.

The agent's implementations (agents/faults, one file a kind) refer to these entries, and the agent holds requests to
them; `ftctl inject`, its options, their help, shell completion and the catalogue in agents/faults/CATALOG.md are made
from them. Standard library only: the smallest processes and `ftctl inject --help` load it.

A newer agent may know kinds that this list does not have: `ftctl inject KIND --param NAME=VALUE` asks for them.
"""

from __future__ import annotations

from dataclasses import dataclass

ParamValue = bool | int | float | str

# What a fault is aimed at, and how that is named on the command line and in an InjectRequest.
TARGETS = {
    "nic": "a rail of a node: --node and --nic or --rail",
    "replica": "the processes that a replica has on a node, or one of them: --replica, --rank",
    "node": "a whole node: --node",
    "coordinator": "the coordinator of the job, where it runs on the agent's node",
}


@dataclass(frozen=True)
class Param:
    """A parameter a user may give. `type`: int, float, str or bool; numbers may have limits, texts `choices`."""

    name: str
    type: str
    help: str
    unit: str = ""
    default: ParamValue | None = None  # None: required
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        """On the command line."""
        return "--" + self.name.replace("_", "-")


@dataclass(frozen=True)
class Spec:
    """One kind of fault. `irreversible`: what it does cannot be undone; it happens once, and has no duration.

    `takes_out`: its target is lost to the job while it lasts, so the guards of the last rail or replica apply.
    `whole_node`: it touches rails and replicas of the node, and no other fault is on them meanwhile.
    """

    kind: str
    summary: str  # one sentence, shown in help
    target: str  # a key of TARGETS
    params: tuple[Param, ...] = ()
    irreversible: bool = False
    takes_out: bool = False
    whole_node: bool = False


_ALL = (
    Spec("noop", "Change nothing but a marker file of the agent's own: a rehearsal of the life cycle", "node"),
    Spec(
        "link-down",
        "Set a rail down (administratively), as a pulled cable or a dead optic at this end would",
        "nic",
        takes_out=True,
    ),
    Spec(
        "proc-kill",
        "Send a replica's processes a signal that ends them, as the OOM killer, a crash or a lost GPU would",
        "replica",
        (
            Param(
                "signal",
                "str",
                "Which one",
                default="KILL",
                choices=("KILL", "SEGV", "ABRT", "BUS", "TERM", "INT"),
            ),
        ),
        irreversible=True,
        takes_out=True,
    ),
    Spec(
        "proc-hang",
        "Stop a replica's processes (SIGSTOP), as a driver that hangs would: connections stay, nothing moves",
        "replica",
        takes_out=True,
    ),
    Spec(
        "proc-slow",
        "Slow a replica's processes down by stopping and resuming them all the time, as a throttled core would",
        "replica",
        (
            Param("percent", "float", "Part of the time in which they stand still", "percent", 50.0, 1, 95),
            Param("period_ms", "float", "One stop and one resumption", "ms", 100.0, 20, 5000),
        ),
    ),
)

SPECS: dict[str, Spec] = {spec.kind: spec for spec in _ALL}
