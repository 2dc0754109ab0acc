"""The whole machine as one value, so that a test can hand in another one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from agents.host.clock import Clock, SystemClock
from agents.host.links import Links, NetlinkLinks
from agents.host.netns import may_change_network, namespace_inode
from agents.host.nft import Nft, NftProgram
from agents.host.qdiscs import NetlinkQdiscs, Qdiscs
from agents.host.sysfs import Sysfs
from agents.host.workers import NoWorkers, Workers


@dataclass(frozen=True)
class Machine:
    """What faults and monitors may touch.

    `netns` is the number of the network namespace, `net_admin` the right to change it, `scratch` a directory of the
    agent's own for faults that keep something on disk, `rails` the devices that are declared as such,
    `workers` the training processes here.
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
    net_admin: bool = field(default_factory=may_change_network)
