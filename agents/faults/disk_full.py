"""The file system of the agent's state directory fills up: logs, core dumps, a checkpoint too many.

One file of ours takes the space, all of it but a reserve, so that the agent can still write down what it does. The
space is allocated, not written, where the file system can do that.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from agents.api.faultspecs import SPECS
from agents.faults.contract import Fault, Params, Probe, Refusal, Target
from agents.host.errors import HostError
from agents.host.machine import Machine

PIECE_MB = 256


class DiskUndo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    mb: int  # 0: as much as there is
    leave_mb: int


class DiskFull(Fault[DiskUndo]):
    spec = SPECS["disk-full"]
    survives_boot = True
    undo_type = DiskUndo

    def check(self, machine: Machine, target: Target, params: Params) -> Refusal | None:
        wanted, leave = int(params["mb"]), int(params["leave_mb"])
        free = _free_mb(machine.scratch.parent)
        if free - max(wanted, 1) >= leave:
            return None
        where = machine.scratch.parent
        reason = f"{free} MB are free at {where}: less than {leave} MB would be left"
        return Refusal("refused", reason, "--mb, or --leave-mb")

    def plan(self, machine: Machine, target: Target, params: Params) -> DiskUndo:
        path = machine.scratch / f"fill-{secrets.token_hex(6)}"
        return DiskUndo(str(path), int(params["mb"]), int(params["leave_mb"]))

    def inject(self, machine: Machine, undo: DiskUndo) -> None:
        operation = f"fill {undo.path}"
        try:
            machine.scratch.mkdir(mode=0o700, exist_ok=True)
            file = os.open(undo.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HostError.of(operation, error) from None
        try:
            taken = 0
            while not undo.mb or taken < undo.mb:
                room = _free_mb(machine.scratch) - undo.leave_mb
                piece = min(PIECE_MB, room, undo.mb - taken if undo.mb else room)
                if piece < 1:
                    break
                os.posix_fallocate(file, taken << 20, piece << 20)
                taken += piece
        except OSError as error:
            raise HostError.of(operation, error) from None
        finally:
            os.close(file)

    def undo(self, machine: Machine, undo: DiskUndo) -> str:
        try:
            Path(undo.path).unlink()
        except FileNotFoundError:
            return "the file is not there"
        except OSError as error:
            raise HostError.of(f"remove {undo.path}", error) from None
        return "the file is removed"

    def probe(self, machine: Machine, undo: DiskUndo) -> Probe:
        try:
            size = os.stat(undo.path).st_blocks * 512 >> 20
            return Probe(True, f"{undo.path} takes {size} MB, {_free_mb(machine.scratch)} MB are free")
        except FileNotFoundError:
            return Probe(False, "the file is not there")
        except OSError as error:
            return Probe(None, f"{undo.path} cannot be looked at: {error.strerror}")

    def by_hand(self, undo: DiskUndo) -> list[str]:
        return [f"rm {undo.path}"]


def _free_mb(path: Path) -> int:
    """What users other than root may still write. Raises HostError."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        raise HostError.of(f"look at {path}", error) from None
    return found.f_bavail * found.f_frsize >> 20
