"""An Xid is reported of a GPU. It counts for as long as the fault lasts; a marker file of the agent's own says so.

No program can make a real driver report an Xid. On real GPUs it is therefore said inside this agent only, and no other
health daemon of the node, which might drain or reboot it, hears of it. Simulated GPUs raise it in their driver.
Where those daemons are what is to be tried, `kmsg` writes the driver's line to the kernel log as well, with a mark that
names the fault; that cannot be taken back, nor what they do, so it takes a second word, `expect_remediation`.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from agents.api.faultspecs import SPECS
from agents.faults import gpus
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.faults.gpus import StateUndo
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.host.simgpus import SimulatedGpus, SimulationProblem

FELL_OFF_THE_BUS = 79


class XidUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    marker: str
    gpu: int
    xid: int
    state: StateUndo | None = None  # of simulated GPUs
    line: str = ""  # for the kernel log


class GpuXid(Fault[XidUndo]):
    spec = SPECS["gpu-xid"]
    survives_boot = True
    undo_type = XidUndo

    def unsupported(self, machine: Machine) -> str:
        return machine.gpus.why_none()

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        return gpus.refusal(machine, target) or _line_refused(machine, target, params)

    def plan(self, machine: Machine, target: Target, params: Params) -> XidUndo:
        simulated, state = machine.gpus.simulated, None
        if simulated is not None:
            lost = f"gpu.{target.gpu}.lost"
            values: dict[str, str | None] = {lost: "1"} if params["xid"] == FELL_OFF_THE_BUS else {}
            try:
                state = StateUndo(str(simulated.path), values, simulated.look(values))
            except SimulationProblem as error:
                raise HostError("look at the simulated GPUs", 0, str(error)) from None
        marker = machine.scratch / f"xid-{secrets.token_hex(4)}"
        line = _line(machine.gpus.slot(target.gpu), int(params["xid"])) if params.get("kmsg") else ""
        return XidUndo(str(marker), target.gpu, int(params["xid"]), state, line)

    def named(self, undo: XidUndo, fault_id: str) -> XidUndo:
        if not undo.line:
            return undo
        return msgspec.structs.replace(undo, line=f"{undo.line} (injected by ftctl fault {fault_id})")

    def inject(self, machine: Machine, undo: XidUndo) -> None:
        try:
            machine.scratch.mkdir(mode=0o700, exist_ok=True)
            Path(undo.marker).touch(mode=0o600)
        except OSError as error:
            raise HostError.of(f"make {undo.marker}", error) from None
        if undo.state is None:
            if undo.line:
                machine.kernel_line.write(undo.line)
            machine.gpus.report_xid(undo.gpu, undo.xid)
            return
        try:
            SimulatedGpus(Path(undo.state.state)).raise_xid(undo.gpu, undo.xid)
        except SimulationProblem as error:
            raise HostError(f"raise Xid {undo.xid}", 0, str(error)) from None
        if undo.state.values:
            gpus.write(undo.state)

    def undo(self, machine: Machine, undo: XidUndo) -> str:
        try:
            Path(undo.marker).unlink(missing_ok=True)
        except OSError as error:
            raise HostError.of(f"remove {undo.marker}", error) from None
        words = f"Xid {undo.xid} of GPU {undo.gpu} counts no longer"
        if undo.line:
            words += "; its line stays in the kernel log, and what others did because of it is not undone"
        if undo.state is not None and undo.state.values:
            words += f"; {gpus.take_back(undo.state)}"
        return words

    def probe(self, machine: Machine, undo: XidUndo) -> Probe:
        there = Path(undo.marker).exists()
        lost = undo.state is not None and bool(undo.state.values) and gpus.in_force(undo.state)
        words = f"Xid {undo.xid} of GPU {undo.gpu} {'counts' if there else 'does not count'}"
        return Probe(there or lost, words + (", which is lost" if lost else ""))

    def by_hand(self, undo: XidUndo) -> list[str]:
        more = gpus.by_hand(undo.state) if undo.state is not None and undo.state.values else []
        return [f"rm {undo.marker}", *more]


def _line_refused(machine: Machine, target: Target, params: Params) -> Refusal | None:
    kmsg, meant = bool(params.get("kmsg")), bool(params.get("expect_remediation"))
    if meant and not kmsg:
        why = "--expect-remediation is about the line in the kernel log, and none would be written"
        return Refusal("bad-request", why, "add --kmsg, or leave it out")
    if not kmsg:
        return None
    if not meant:
        why = "other health daemons of the node act on a line in the kernel log: they may drain or reboot it"
        return Refusal("bad-request", why, "if that is meant, add --expect-remediation")
    if machine.gpus.simulated is not None:
        why = "its GPUs are simulated, and the kernel log is that of the whole machine"
        return Refusal("refused", why, "leave out --kmsg: the simulated driver raises the Xid")
    if why := machine.kernel_line.why_not():
        return Refusal("refused", why, "leave out --kmsg: then only the agent hears of it")
    if not machine.gpus.slot(target.gpu):
        return Refusal("refused", "its PCI slot is not known, which the line would name", "ftctl status")
    return None


def _line(slot: str, code: int) -> str:
    """As the driver writes it, but for the process."""
    words = "GPU has fallen off the bus." if code == FELL_OFF_THE_BUS else "reported for a test."
    return f"NVRM: Xid (PCI:{slot}): {code}, name=ftctl, {words}"
