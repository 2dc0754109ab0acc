"""What a kind of fault, its parameters and its targets are; the kinds are in faultspecs.py. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass

ParamValue = bool | int | float | str
TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool, "addresses": str}
MAX_TEXT = 500

# What a fault is aimed at, and how that is named on the command line and in an InjectRequest.
TARGETS = {
    "nic": "a rail of a node: --node and --nic or --rail",
    "replica": "the processes that a replica has on a node, or one of them: --replica, --rank",
    "node": "a whole node: --node",
    "gpu": "a GPU of a node, or all that the driver shows of them: --node, --gpu",
    "coordinator": "the coordinator of the job, where it runs on the agent's node",
}


@dataclass(frozen=True)
class Param:
    """A parameter a user may give. `type`: int, float, str, bool or addresses; texts may have `choices`.

    Addresses are a text of IP addresses with commas between them; for a user of ftctl, nodes will do.
    """

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

    def problem(self, value: ParamValue) -> str:
        """What is wrong with a value; empty if nothing is. A whole number will do for a float, never the other way."""
        wanted = TYPES[self.type]
        if not (type(value) is wanted or (wanted is float and type(value) is int)):
            return f"must be {self.type}, not {type(value).__name__}"
        if isinstance(value, str):
            if self.choices and value not in self.choices:
                return f"must be one of {', '.join(self.choices)}"
            return f"is longer than {MAX_TEXT} characters" if len(value) > MAX_TEXT else ""
        if not math.isfinite(value):
            return "must be a finite number"
        if self.minimum is not None and value < self.minimum:
            return f"must be at least {self.minimum:g} {self.unit}".rstrip()
        if self.maximum is not None and value > self.maximum:
            return f"must be at most {self.maximum:g} {self.unit}".rstrip()
        return ""


@dataclass(frozen=True)
class Spec:
    """One kind of fault. `irreversible`: what it does cannot be undone; it happens once, and has no duration.

    `takes_out`: its target is lost to the job while it lasts, so the guards of the last rail or replica apply.
    `whole_node`: it touches rails and replicas of the node, and no other fault is on them meanwhile. `rails`: it is
    aimed at a node and changes all rails of it.
    """

    kind: str
    summary: str  # one sentence, shown in help
    target: str  # a key of TARGETS
    params: tuple[Param, ...] = ()
    irreversible: bool = False
    takes_out: bool = False
    whole_node: bool = False
    rails: bool = False
