"""What faults on simulated GPUs share: some values in the file that the simulated driver reads, and back again."""

from __future__ import annotations

import re
import shlex
from abc import abstractmethod
from pathlib import Path

import msgspec

from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.host.simgpus import SimulatedGpus, SimulationProblem


class StateUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`state`: the file. `values`: what is written, `old`: what was there (null: nothing)."""

    state: str
    values: dict[str, str | None]
    old: dict[str, str | None]


def refusal(machine: Machine, target: Target) -> Refusal | None:
    """None if that GPU is there."""
    known = machine.gpus.indexes()
    if target.gpu < 0 or target.gpu in known:
        return None
    there = f"there are {', '.join(map(str, known))}" if known else machine.gpus.why_none()
    return Refusal("bad-request", f"{target.node} has no GPU {target.gpu}", there)


def state_of(machine: Machine) -> SimulatedGpus:
    """Raises HostError where the GPUs are real, or none are there."""
    if machine.gpus.simulated is None:
        raise HostError("change the GPUs", 0, machine.gpus.why_none() or "they are no simulated ones")
    return machine.gpus.simulated


def write(undo: StateUndo) -> None:
    try:
        SimulatedGpus(Path(undo.state)).change(undo.values)
    except SimulationProblem as error:
        raise HostError("change the simulated GPUs", 0, str(error)) from None


def take_back(undo: StateUndo) -> str:
    """What somebody else wrote meanwhile stays."""
    if not undo.values:
        return "nothing was changed"
    if not Path(undo.state).exists():
        return "the simulated GPUs are gone"
    try:
        SimulatedGpus(Path(undo.state)).restore(undo.old, undo.values)
    except SimulationProblem as error:
        raise HostError("put the simulated GPUs back", 0, str(error)) from None
    return "the simulated GPU is as it was"


def in_force(undo: StateUndo) -> bool:
    try:
        return bool(undo.values) and SimulatedGpus(Path(undo.state)).look(undo.values) == undo.values
    except SimulationProblem:
        return False


def by_hand(undo: StateUndo) -> list[str]:
    edits = []
    for key, value in undo.old.items():
        name = key.replace(".", r"\.")
        edits.append(f"/^{name}=/d" if value is None else f"s|^{name}=.*|{key}={_literal(value)}|")
    if not undo.values:
        return ["# nothing: nothing was changed"]
    file = shlex.quote(undo.state)
    missing = [
        f"echo {shlex.quote(f'{key}={value}')} >> {file}"
        for key, value in undo.old.items()
        if value and not undo.values[key]
    ]
    return [*(f"sed -i {shlex.quote(edit)} {file}" for edit in edits), *missing]


def _literal(value: str) -> str:
    """In the place of sed's replacement."""
    return re.sub(r"([\\&|])", r"\\\1", value)


class StateFault(Fault[StateUndo]):
    """One that is nothing but other values in the state of a simulated GPU."""

    survives_boot = True  # the file is there again
    undo_type = StateUndo

    @abstractmethod
    def values(self, gpus: SimulatedGpus, gpu: int, params: Params) -> dict[str, object]:
        """Names under gpu.N. with their new values; a name that begins with a dot is one of the driver's own. Raises
        SimulationProblem for what this model has not got."""

    def unsupported(self, machine: Machine) -> str:
        if machine.gpus.simulated is None:
            return machine.gpus.why_none() or "its GPUs are hardware, where this cannot be made and taken back"
        return ""

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        if refused := refusal(machine, target):
            return refused
        try:
            undo = self._plan(machine, target, params)
        except SimulationProblem as error:
            return Refusal("bad-request", str(error))
        if in_force(undo):
            return Refusal("refused", f"{target} is so already, and by no fault of ours")
        return None

    def plan(self, machine: Machine, target: Target, params: Params) -> StateUndo:
        try:
            return self._plan(machine, target, params)
        except SimulationProblem as error:
            raise HostError("look at the simulated GPUs", 0, str(error)) from None

    def _plan(self, machine: Machine, target: Target, params: Params) -> StateUndo:
        gpus = state_of(machine)
        values = self.values(gpus, target.gpu, params).items()
        keyed = {key[1:] if key[0] == "." else f"gpu.{target.gpu}.{key}": str(value) for key, value in values}
        return StateUndo(str(gpus.path), dict(keyed), gpus.look(keyed))

    def inject(self, machine: Machine, undo: StateUndo) -> None:
        write(undo)

    def undo(self, machine: Machine, undo: StateUndo) -> str:
        return take_back(undo)

    def probe(self, machine: Machine, undo: StateUndo) -> Probe:
        shown = ", ".join(f"{key}={value}" for key, value in undo.values.items())
        there = in_force(undo)
        return Probe(there, f"simulated: {shown}" if there else f"simulated, not any more: {shown}")

    def by_hand(self, undo: StateUndo) -> list[str]:
        return by_hand(undo)
