"""Nothing, with the whole life cycle around it.

The no-op rehearses everything but the damage: rights, guards, the record on disk, the deadline, the watchdog, the
revert. So that a probe has something real to look at, its effect is a marker file in the agent's own directory.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from agents.api.faultspecs import SPECS
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.host.errors import HostError
from agents.host.machine import Machine


class NoopUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    marker: str


class Noop(Fault[NoopUndo]):
    spec = SPECS["noop"]
    survives_boot = True
    undo_type = NoopUndo

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        return None

    def plan(self, machine: Machine, target: Target, params: Params) -> NoopUndo:
        return NoopUndo(marker=str(machine.scratch / f"noop-{secrets.token_hex(4)}"))

    def inject(self, machine: Machine, undo: NoopUndo) -> None:
        try:
            machine.scratch.mkdir(mode=0o700, exist_ok=True)
            Path(undo.marker).touch(mode=0o600)
        except OSError as error:
            raise HostError.of(f"make {undo.marker}", error) from None

    def undo(self, machine: Machine, undo: NoopUndo) -> str:
        try:
            Path(undo.marker).unlink(missing_ok=True)
        except OSError as error:
            raise HostError.of(f"remove {undo.marker}", error) from None
        return "the marker file is gone"

    def probe(self, machine: Machine, undo: NoopUndo) -> Probe:
        try:
            there = Path(undo.marker).exists()
        except OSError as error:
            return Probe(None, f"{undo.marker} cannot be looked at: {error.strerror}")
        return Probe(there, "the marker file is there" if there else "the marker file is not there")

    def by_hand(self, undo: NoopUndo) -> list[str]:
        return [f"rm {undo.marker}"]
