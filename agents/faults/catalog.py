"""The faults there are. Explicit: a fault that is not in this list does not exist, and importing a file adds none."""

from __future__ import annotations

from typing import Any

import msgspec

from agents.faults.agent_kill import AgentKill
from agents.faults.contract import Fault
from agents.faults.coordinator import CoordinatorFreeze, CoordinatorKill
from agents.faults.disk_full import DiskFull
from agents.faults.gpu_busy import GpuBusy
from agents.faults.gpu_ecc import GpuEcc
from agents.faults.gpu_hang import GpuHang
from agents.faults.gpu_lost import GpuLost
from agents.faults.gpu_mem_hog import GpuMemHog
from agents.faults.gpu_row_remap import GpuRowRemap
from agents.faults.gpu_throttle import GpuThrottle
from agents.faults.gpu_xid import GpuXid
from agents.faults.link_blackhole import LinkBlackhole
from agents.faults.link_corrupt import LinkCorrupt
from agents.faults.link_delay import LinkDelay
from agents.faults.link_down import LinkDown
from agents.faults.link_duplicate import LinkDuplicate
from agents.faults.link_flap import LinkFlap
from agents.faults.link_loss import LinkLoss
from agents.faults.link_rate import LinkRate
from agents.faults.link_reorder import LinkReorder
from agents.faults.mem_hog import MemHog
from agents.faults.node_down import NodeDown
from agents.faults.noop import Noop
from agents.faults.nvlink_error import NvlinkError
from agents.faults.nvml_hang import NvmlHang
from agents.faults.partition import Partition
from agents.faults.proc_hang import ProcHang
from agents.faults.proc_kill import ProcKill
from agents.faults.proc_slow import ProcSlow
from agents.faults.replica_crash_at import ReplicaCrashAt
from agents.faults.state_corrupt import StateCorrupt

AnyFault = Fault[Any]  # each fault fixes the type of its own record; a list of them cannot

_ALL: tuple[AnyFault, ...] = (
    Noop(),
    LinkDown(),
    LinkFlap(),
    LinkBlackhole(),
    LinkLoss(),
    LinkDuplicate(),
    LinkRate(),
    LinkDelay(),
    LinkCorrupt(),
    LinkReorder(),
    Partition(),
    ProcKill(),
    ProcHang(),
    ProcSlow(),
    ReplicaCrashAt(),
    MemHog(),
    DiskFull(),
    NodeDown(),
    AgentKill(),
    CoordinatorKill(),
    CoordinatorFreeze(),
    StateCorrupt(),
    GpuXid(),
    GpuLost(),
    GpuEcc(),
    GpuRowRemap(),
    GpuThrottle(),
    GpuHang(),
    GpuMemHog(),
    GpuBusy(),
    NvlinkError(),
    NvmlHang(),
)

CATALOG: dict[str, AnyFault] = {fault.kind: fault for fault in _ALL}


def read_undo(fault: AnyFault, raw: bytes) -> msgspec.Struct:
    """A fault's record as it was written. Raises msgspec.ValidationError or DecodeError."""
    record: msgspec.Struct = msgspec.json.decode(raw, type=fault.undo_type)
    return record
