"""What each system needs beside its replicas, and with which settings it runs. The settings stand in every row."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftar_core.bench.peers.forks import Forks
from ftar_core.bench.peers.place import Place
from ftar_core.bench.report import BenchError
from ftar_core.protocol.config import LAB_DETECTION
from ftar_core.wire.operator import OperatorClient

JOB = "bench"
BEAT_S = LAB_DETECTION.heartbeat_interval_s
READY_S = 60.0
# The command torchft_lighthouse's own. (Its Python class waits 100 ms only for stragglers.)
LIGHTHOUSE = {"heartbeat_timeout_ms": 5000, "join_timeout_ms": 60000, "quorum_tick_ms": 100}
SYSTEMS = {
    "ftar": "ftar_core",
    "ftar+spare": "ftar_core with one hot spare",
    "torchft": "torchft as it comes",
    "torchft-tuned": "torchft with this benchmark's --evict-after, and the shortest other waits",
    "restart": "a synchronous job that stops, reloads a checkpoint and starts again",
}


@dataclass(frozen=True)
class Wishes:
    """What all systems have in common. Seconds; `checkpoint_every` in steps; `model` one of PACED.
    `restart_timeout_s`: of the collectives of `restart`."""

    replicas: int
    step_ms: float
    model: str
    seed: int
    evict_s: float
    checkpoint_every: int
    restart_timeout_s: float


class System:
    """One of SYSTEMS, running: its services, and what its replicas are told. A context of `directory`."""

    def __init__(self, name: str, wishes: Wishes, place: Place, forks: Forks, directory: Path) -> None:
        self.name, self.wishes, self.place = name, wishes, place
        self.whole = name == "restart"  # one that ends takes all others along
        self.spares = 1 if name == "ftar+spare" else 0
        self.replicas = [f"r{i}" for i in range(wishes.replicas + self.spares)]
        self._forks, self._directory = forks, directory
        self._settings: dict[str, Any] = {}
        self._environment: dict[str, str] = {}
        self._operator: OperatorClient | None = None
        self.notes = ""
        kind = name.split("-", maxsplit=1)[0].split("+", maxsplit=1)[0]
        self.kind = kind
        start: Mapping[str, Callable[[], None]] = {
            "ftar": self._start_ftar,
            "torchft": self._start_torchft,
            "restart": self._start_restart,
        }
        start[kind]()

    def _start_ftar(self) -> None:
        for name in ("token", "operator"):
            (self._directory / name).touch(mode=0o600)
            (self._directory / name).write_text(secrets.token_hex(16))
        port = self._directory / "port"
        evict = self.wishes.evict_s
        suspect = min(evict, max(2 * BEAT_S, evict * 0.6))
        arguments = [
            *("--job", JOB, "--replicas", str(self.wishes.replicas), "--spares", str(self.spares)),
            *("--profile", "lab", "--suspect-after", f"{suspect:g}s", "--evict-after", f"{evict:g}s"),
            *("--store", str(self._directory / "store"), "--token-file", str(self._directory / "token")),
            *("--operator-token-file", str(self._directory / "operator")),
            *("--listen", f"{self.place.host}:0", "--port-file", str(port)),
        ]
        self._forks.start("coordinator", "coordinator", arguments=arguments)
        number = int(self._ready(port))
        self._operator = OperatorClient(
            self.place.host, number, JOB, (self._directory / "operator").read_bytes(), "bench"
        )
        self._environment = {
            "FTAR_COORDINATOR": f"{self.place.host}:{number}",
            "FTAR_JOB": JOB,
            "FTAR_TOKEN_FILE": str(self._directory / "token"),
        }
        self.notes = f"heartbeat {BEAT_S:g} s, evicted after {evict:g} s"

    def _start_torchft(self) -> None:
        options: dict[str, int] = dict(LIGHTHOUSE)
        self.notes = "heartbeat 0.1 s, dead after 5 s, join timeout 60 s, collective timeout 60 s (defaults)"
        if self.name == "torchft-tuned":
            evict_ms = round(self.wishes.evict_s * 1000)
            options.update(heartbeat_timeout_ms=evict_ms, join_timeout_ms=evict_ms, quorum_tick_ms=10)
            self._settings = {"heartbeat": BEAT_S, "collective_timeout": self.wishes.evict_s}
            self.notes = (
                f"heartbeat {BEAT_S:g} s, dead after {self.wishes.evict_s:g} s, join timeout the same,"
                f" quorum tick 10 ms, collective timeout {self.wishes.evict_s:g} s"
            )
        ready = self._directory / "lighthouse"
        port = self.place.free_port()
        self._forks.start("lighthouse", "lighthouse", port=port, options=options, ready=str(ready))
        self._ready(ready)
        self._settings["lighthouse"] = f"http://{self.place.host}:{port}"

    def _start_restart(self) -> None:
        self._settings = {
            "rendezvous": str(self._directory / "rendezvous"),
            "checkpoint": str(self._directory / "checkpoint"),
            "checkpoint_every": self.wishes.checkpoint_every,
            "collective_timeout": self.wishes.restart_timeout_s,
        }
        self.notes = (
            f"collective timeout {self.wishes.restart_timeout_s:g} s,"
            f" checkpoint every {self.wishes.checkpoint_every} steps"
        )

    def _ready(self, path: Path) -> str:
        deadline = time.monotonic() + READY_S
        while not (path.exists() and (text := path.read_text().strip())):
            for end in self._forks.ended():
                raise BenchError(f"{self.name}: {end.name} ended with {end.code}: {self._forks.last_words(end.name)}")
            if time.monotonic() > deadline:
                raise BenchError(f"{self.name}: its control plane does not answer within {READY_S:.0f} s")
            time.sleep(0.01)
        return text

    def start(self, number: int, life: int) -> int:
        """A replica, from nothing; its process."""
        name, address = self.replicas[number], self.place.address(number)
        environment = dict(self._environment)
        if self.kind == "ftar":
            environment |= {"FTAR_REPLICA": name, "FTAR_RAILS": self.place.rails(number), "FTAR_NODE": f"node-{name}"}
        elif self.place.device():
            environment["GLOO_SOCKET_IFNAME"] = self.place.device()
        plan = {
            "system": self.kind,
            "replica": name,
            "number": number,
            "replicas": self.wishes.replicas,
            "life": life,
            "step_ms": self.wishes.step_ms,
            "model": self.wishes.model,
            "seed": self.wishes.seed,
            "journal": str(self._directory),
            "address": address,
            "device": self.place.device(),
            "settings": self._settings,
            "environment": environment,
        }
        return self._forks.start(name, "replica", network=self.place.handle(number), host=address, plan=plan)

    def spare_ready(self) -> bool:
        """A spare that is wanted follows, so that the next loss finds it."""
        if self.spares == 0 or self._operator is None:
            return True
        try:
            job = self._operator.request("status").job
        except (TimeoutError, OSError):
            return False
        return job is not None and sum(r.state == "spare" for r in job.replicas) >= self.spares

    def close(self) -> None:
        if self._operator is not None:
            self._operator.close()


def describe(directory: Path, about: Mapping[str, Any]) -> None:
    """What a directory of journals is about, for whoever reads it later."""
    temporary = directory / "about.new"
    temporary.write_text(json.dumps(about, indent=1) + "\n")
    os.replace(temporary, directory / "about.json")
