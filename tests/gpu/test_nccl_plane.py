"""The data plane over real NCCL: two replicas of one rank each on one GPU, through our own net plugin.

NCCL takes two ranks on one GPU only if they look like two hosts (NCCL_HOSTID), and must not use shared memory or peer
access then. The library is torch's. Skipped without a device; the figures go into FTAR_GPU_FIGURES as those of the
other tests here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ftar_core import ncclenv
from ftar_core.wire.operator import OperatorClient

TRAINER = Path(__file__).with_name("nccl_trainer.py")
STEPS_S = 60.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or a torch without CUDA"),
    pytest.mark.skipif(ncclenv.find_nccl() is None, reason="no libnccl.so.2"),
]


class Job:
    def __init__(self, path: Path) -> None:
        self.path = path
        for name, token in (("token", "gpu-test-token-of-a-job"), ("operator", "gpu-test-token-of-an-operator")):
            (path / name).write_text(token)
            (path / name).chmod(0o600)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        arguments = [
            *("-m", "ftar_core.coordinator", "--job", "g", "--replicas", "2", "--min-replicas", "1"),
            *("--profile", "lab", "--store", str(path / "store"), "--token-file", str(path / "token")),
            *("--operator-token-file", str(path / "operator")),
            *("--listen", "127.0.0.1:0", "--port-file", str(path / "port")),
        ]
        self.launch("coordinator", arguments)
        self.until(lambda: (path / "port").exists() and (path / "port").read_text().strip(), "the coordinator listens")
        self.port = int((path / "port").read_text())

    def launch(self, name: str, arguments: list[str], **environment: str) -> None:
        with (self.path / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *arguments], stdout=log, stderr=log, env={**os.environ, **environment}
            )

    def start(self, name: str, plane: str) -> None:
        plugin = ncclenv.environment(plugin=ncclenv.plugin_path(), current={}, rails="a=127.0.0.1", allow_sockets=True)
        self.launch(
            name,
            [str(TRAINER), str(self.path / f"{name}.steps")],
            **plugin,
            NCCL_HOSTID=f"host-of-{name}",
            NCCL_P2P_DISABLE="1",
            NCCL_SHM_DISABLE="1",
            NCCL_SOCKET_IFNAME="lo",
            FTAR_NET_BACKUP="none",
            FTAR_DATA_PLANE=plane,
            FTAR_COORDINATOR=f"127.0.0.1:{self.port}",
            FTAR_JOB="g",
            FTAR_REPLICA=name,
            FTAR_TOKEN_FILE=str(self.path / "token"),
            FTAR_RAILS="a=127.0.0.1",
            FTAR_NODE=f"node-{name}",
        )

    def steps(self, name: str) -> list[tuple[int, str, str, float]]:
        """(step, contributors, digest of the parameters, seconds since the step before)"""
        path = self.path / f"{name}.steps"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(step), who, digest, float(took)) for step, who, digest, took in rows]

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + STEPS_S
        while not condition():
            logs = "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.path.glob("*.log")))
            assert time.monotonic() < deadline, f"not within {STEPS_S:g} s: {what}\n{logs}"
            time.sleep(0.05)

    def finish(self) -> None:
        operator = OperatorClient("127.0.0.1", self.port, "g", b"gpu-test-token-of-an-operator", "tester")
        with operator:
            assert operator.request("finish", reason="test").code == "ok"
        for name, process in self.processes.items():
            if name != "coordinator" and process.returncode is None:
                self.until(lambda process=process: process.poll() is not None, f"{name} ends")
                assert process.returncode == 0, (self.path / f"{name}.log").read_text()[-3000:]

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def test_a_replica_killed_in_the_middle_of_an_nccl_all_reduce_is_survived_and_comes_back(job: Job) -> None:
    job.start("r0", "nccl")
    job.start("r1", "nccl")
    job.until(lambda: len(job.steps("r1")) >= 20, "20 steps of both")
    log = (job.path / "r0.log").read_text()
    assert "FTAR" in log, f"NCCL did not use the plugin:\n{log[-3000:]}"
    began = time.monotonic()
    job.processes["r1"].send_signal(signal.SIGKILL)  # most of a step is the all-reduce
    job.processes["r1"].wait()
    job.until(lambda: job.steps("r0")[-1][1] == "r0", "r0 goes on alone")
    alone_s = time.monotonic() - began
    job.start("r1", "nccl")
    job.until(lambda: job.steps("r0")[-1][1] == "r0,r1", "r1 contributes again")
    back = job.steps("r0")[-1][0]
    job.until(lambda: job.steps("r0")[-1][0] > back + 10, "10 more steps of both")
    job.finish()
    mine, theirs = ({step: digest for step, _, digest, _ in job.steps(name)} for name in ("r0", "r1"))
    assert sorted(mine) == list(range(1, max(mine) + 1)), "no step lost"
    shared = mine.keys() & theirs.keys()
    assert len(shared) > 20
    assert all(mine[step] == theirs[step] for step in shared), "the same bits on both, at every step"
    both = sorted(took for _, who, _, took in job.steps("r0") if who == "r0,r1")
    if path := os.environ.get("FTAR_GPU_FIGURES"):
        known = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        known["nccl plane"] = {"step_ms": both[len(both) // 2] * 1e3, "alone_after_kill_s": alone_s}
        Path(path).write_text(json.dumps(known))
