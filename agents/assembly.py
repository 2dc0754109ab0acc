"""Parts of an agent, as its settings want them; and what keeps an agent from running."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from agents.api.policyfile import read as read_policy
from agents.health.desk import HealthDesk
from agents.host.gpus import NodeGpus, Seen
from agents.host.machine import Machine
from agents.host.simgpus import SimulatedGpus, SimulationProblem
from agents.monitors.gpus import GpuMonitor
from agents.monitors.nics import NicMonitor
from agents.monitors.nvml_child import XidSeen
from agents.monitors.portmemory import PortMemory
from agents.monitors.rdma import RdmaMonitor
from agents.policy.book import PolicyBook
from agents.policy.hands import NodeHands
from agents.policy.runner import PolicyRunner
from agents.settings import AgentSettings

FAILED, USAGE, IN_FORCE = 1, 2, 5


class DaemonProblem(Exception):
    """One line for the user, and the exit code."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


def gpu_monitor(settings: AgentSettings, on_xid: Callable[[XidSeen], None]) -> tuple[GpuMonitor, NodeGpus]:
    """With simulated GPUs: made at the first start; their state outlives the agent, as a GPU's does."""
    wanted, environment, expect, gpus = settings.simulated_gpus, None, settings.expect_gpus, None
    if wanted is not None:
        folder = settings.state_dir / "gpus"
        gpus = SimulatedGpus(folder / "state")
        try:
            if not gpus.path.exists():
                gpus = SimulatedGpus.create(folder, settings.node, wanted.count, wanted.profile)
        except (SimulationProblem, OSError) as error:
            raise DaemonProblem(f"simulated GPUs cannot be made: {error}") from None
        environment = gpus.environment()
        expect = wanted.count if expect is None else expect

    def look() -> Seen:
        summary = monitor.summary()
        return Seen(
            tuple((gpu.index, gpu.pids) for gpu in summary.devices),
            summary.note,
            {gpu.index: gpu.uuid for gpu in summary.devices},
            monitor.slots(),
        )

    def announce(index: int, code: int) -> None:
        uuid = next((gpu.uuid for gpu in monitor.summary().devices if gpu.index == index), "")
        on_xid(XidSeen(index, uuid, code, time.time(), injected=True))

    monitor = GpuMonitor(settings.nvml_deadline_s, expect=expect, environment=environment, on_xid=on_xid)
    return monitor, NodeGpus(look, announce, gpus)


def port_monitors(settings: AgentSettings, machine: Machine, health: HealthDesk) -> tuple[NicMonitor, RdmaMonitor]:
    boot, folder, rails = machine.clock.boot_id(), settings.state_dir, tuple(settings.rails)
    memory = PortMemory(folder / "nics.json", boot)
    nics = NicMonitor(machine.links, rails, settings.management_nic, settings.nics, machine.sysfs, memory)
    rdma = RdmaMonitor(machine.sysfs, PortMemory(folder / "rdma.json", boot), settings.rdma)
    health.clears(nics.clear)
    health.clears(rdma.clear)
    return nics, rdma


def policy_runner(
    settings: AgentSettings, machine: Machine, hands: NodeHands, health: HealthDesk, emit: Callable[..., None]
) -> PolicyRunner:
    """Raises PolicyProblem."""
    file = settings.policy.file
    rules, source = (read_policy(file), str(file)) if file is not None else (read_policy(), "default")
    book = PolicyBook(settings.state_dir / "policy.json", machine.clock.boot_id())
    mode = settings.policy.mode
    return PolicyRunner(settings.node, rules, source, mode, book, hands, health, emit, machine.clock)


def end_after(seconds: float) -> None:
    """As a crash would: nothing is cleaned up."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
