"""What an agent costs its node: processor time and memory with 8 GPUs, 10 NICs and 12 RDMA ports, looked at once a
second.

Processor time is that of the agent and of all its children, as the kernel accounts it, so a busy machine makes it
only a little more; AGENT_COST_SECONDS (60) is how long it is watched, after it has started."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from agent_network import Namespace, add_rail, needs_root
from live_agent import live_agent, until
from pyroute2 import IPRoute
from test_rdma import plant

SECONDS = float(os.environ.get("AGENT_COST_SECONDS", "60"))
GPUS, RAILS = 8, 9  # and a NIC for management
CORE_PERCENT, MIB = 2.0, 100.0


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found += [one for child in (thread / "children").read_text().split() for one in family(int(child))]
    return found


def used_s(pids: list[int]) -> float:
    """Processor time of processes, seconds (proc_pid_schedstat: nanoseconds, by thread)."""
    threads = [thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@needs_root
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_an_agent_with_8_gpus_and_10_nics_at_1_hz(record_property: pytest.RecordProperty) -> None:
    names = [f"rail{number}" for number in range(RAILS)]
    namespace = Namespace()
    try:
        with namespace.entered(), live_agent() as agent:
            with IPRoute() as routes:
                for number, name in enumerate([*names, "mgmt0"]):
                    add_rail(routes, name, number)
            agent.settings |= {
                "rails": names,
                "management_nic": "mgmt0",
                "simulated_gpus": {"count": GPUS},
                "sysfs_root": str(plant("dgx-h100", agent.root / "sys")),
                "kernel_log": None,
                "poll_s": 1.0,
            }
            agent.start()
            with agent.client() as client:
                until(lambda: len(client.get("/v1/node").json()["gpus"]["devices"]) == GPUS, "the GPUs are read")
                verdicts = client.get("/v1/health").json()["verdicts"]
            assert {"nic", "rdma", "gpu"} <= {verdict["kind"] for verdict in verdicts}
            time.sleep(5)  # the first looks load what later ones need
            pids = family(agent.pid)
            assert len(pids) >= 2, "its child for NVML"
            before, begun = used_s(pids), time.monotonic()
            time.sleep(SECONDS)
            percent = 100 * (used_s(pids) - before) / (time.monotonic() - begun)
            memory = [resident_mib(pid) for pid in pids]
    finally:
        namespace.close()
    record_property("core_percent", round(percent, 2))
    record_property("resident_mib", round(sum(memory), 1))
    print(f"{percent:.2f} % of a core, {sum(memory):.1f} MiB")
    assert percent <= CORE_PERCENT
    assert sum(memory) <= MIB
