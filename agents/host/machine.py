"""The whole machine as one value, so that a test can hand in another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agents.host import coordinators
from agents.host.clock import Clock, SystemClock
from agents.host.errors import HostError
from agents.host.gpus import Gpus, NoGpus
from agents.host.kmsg import KernelLine
from agents.host.links import Links, NetlinkLinks
from agents.host.netns import may_change_network, namespace_inode
from agents.host.nft import Nft, NftProgram
from agents.host.qdiscs import NetlinkQdiscs, Qdiscs
from agents.host.sysfs import Sysfs
from agents.host.workers import NoWorkers, Worker, Workers


def _not_the_agent(_after_s: float) -> None:
    raise HostError("end the agent", 0, "only the agent itself can do that")


@dataclass(frozen=True)
class Machine:
    """What faults and monitors may touch.

    `netns` is the number of the network namespace, `net_admin` the right to change it, `scratch` a directory of the
    agent's own for faults that keep something on disk, `rails` the devices that are declared as such, `workers` the
    training processes here, `gpus` what they compute on, `kernel_line` writes to the kernel log, `coordinator` the
    process of the job's coordinator (HostError if it is not here), `end_agent` kills the agent after so many seconds.
    """

    scratch: Path

    links: Links = field(default_factory=NetlinkLinks)
    sysfs: Sysfs = field(default_factory=Sysfs)
    clock: Clock = field(default_factory=SystemClock)
    netns: int = field(default_factory=namespace_inode)
    nft: Nft = field(default_factory=NftProgram)
    qdiscs: Qdiscs = field(default_factory=NetlinkQdiscs)
    rails: tuple[str, ...] = ()
    workers: Workers = field(default_factory=NoWorkers)
    coordinator: Callable[[], Worker] = coordinators.unknown
    end_agent: Callable[[float], None] = _not_the_agent
    gpus: Gpus = field(default_factory=NoGpus)
    kernel_line: KernelLine = field(default_factory=KernelLine)
    net_admin: bool = field(default_factory=may_change_network)
