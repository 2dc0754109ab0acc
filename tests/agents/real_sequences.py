"""A real node for random sequences: a network namespace with rails, an agent, its watchdog, a supervised process and a
controller, any of which may be killed or stopped at any moment.

What may be seen on it, by a model that knows nothing of how the agent works:

* what differs from the time before any fault is explained by a record on disk that is open;
* what somebody else made there is never touched;
* a fault that the agent says is active is there to be seen until it may be over; one that it says is reverted is not;
* however it ends, everything is as before: addresses, routes, neighbours, IPv6 settings, queues, packet rules, cgroups,
  files, processes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TextIO

from agent_network import Namespace, add_rail, add_routes, pictures, settled
from live_agent import TOKENS, until, write
from pyroute2 import IPRoute

from agents.injection.ledger import Entry, Ledger

HERE = Path(__file__).parent
RAILS = ("rail0", "rail1", "rail2")
LIVES_S = 120.0  # liveness only
# Kinds with what they cannot do without, and what they are aimed at.
WISHES: dict[str, tuple[str, dict[str, Any]]] = {
    "noop": ("node", {}),
    "link-down": ("nic", {}),
    "link-flap": ("nic", {"period_ms": 200.0}),
    "link-blackhole": ("nic", {}),
    "link-loss": ("nic", {"percent": 5.0}),
    "link-rate": ("nic", {"mbit": 100}),
    "link-delay": ("nic", {"delay_ms": 5.0}),
    "partition": ("node", {"peers": "10.77.0.2, fd77::2"}),
    "proc-hang": ("replica", {}),
    "proc-slow": ("replica", {"percent": 50.0}),
    "proc-kill": ("replica", {}),
    "node-down": ("node", {}),
    "mem-hog": ("node", {"mb": 16}),
    "disk-full": ("node", {"mb": 1}),
}


class Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("agent")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(str(self._path))


@dataclass
class Zygote:
    """Where agents come from (agent_zygote.py)."""

    pid: int
    ask: TextIO
    told: TextIO

    def agent(self, namespace: Namespace, config: Path, log: Path) -> int:
        where = f"/proc/{os.getpid()}/fd/{namespace._fd}"
        print(json.dumps({"namespace": where, "config": str(config), "log": str(log)}), file=self.ask, flush=True)
        return int(self.told.readline())


@dataclass
class Known:
    """A fault that the agent has acknowledged: surely in force before `until_s` (monotonic), unless it is `over`."""

    id: str
    kind: str
    nic: str
    undo: list[str]
    until_s: float
    over: bool = False


@dataclass
class RealNode:
    zygote: Zygote
    rng: Random
    done: list[str] = field(default_factory=list)  # what has happened, for whoever reads a failure

    def __post_init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ft-seq-"))
        self.socket, self.log, self.config = self.root / "a.sock", self.root / "log", self.root / "agent.yaml"
        self.ledger = Ledger(self.root / "state" / "ledger")
        self.pid: int | None = None
        self.frozen = False
        self.controller: subprocess.Popen[str] | None = None
        self.faults: dict[str, Known] = {}
        self._theirs = 0
        self.namespace = Namespace()
        tokens = self.root / "tokens.yaml"
        write(tokens, [{"principal": f"the-{role}", "role": role, "token": token} for role, token in TOKENS.items()])
        sleeper = ["-n", "1", "-r", "1", "__import__('time').sleep(1e6)"]
        settings = {
            "node": "node1",
            "state_dir": str(self.root / "state"),
            "listen": None,
            "unix_socket": str(self.socket),
            "tokens_file": str(tokens),
            "watch_links": False,
            "rails": list(RAILS),
            "management_nic": "mgmt0",
            "supervision": {"grace_s": 0.5, "replicas": [{"replica": "r1", "module": "timeit", "args": sleeper}]},
        }
        write(self.config, settings)
        with self.namespace.entered(), IPRoute() as ipr:
            ipr.link("set", index=1, state="up")
            self._indexes = {name: add_rail(ipr, name, number) for number, name in enumerate((*RAILS, "mgmt0"))}
            for number, name in ((0, "rail0"), (3, "mgmt0")):
                settled(ipr, self._indexes[name])
                add_routes_of(ipr, self._indexes[name], number)
            self._nft("add", "table", "inet", "theirs")
            self._nft("add", "chain", "inet", "theirs", "in", "{ type filter hook input priority 5 ; }")
            self._nft("add", "rule", "inet", "theirs", "in", "tcp", "dport", "22", "accept")
            ipr.tc("add", kind="pfifo", index=self._indexes["mgmt0"], handle=0x30000, limit=77)
            for index in self._indexes.values():
                until(lambda at=index: _has_link_local(ipr, at), "a link-local address")  # type: ignore[misc]
                settled(ipr, index)
        self.before = self.look()

    # --- what happens ---------------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status 0 if there is nobody, or he died meanwhile."""
        headers = {"Authorization": f"Bearer {TOKENS['chaos']}", "Content-Type": "application/json"}
        try:
            with contextlib.closing(Unix(self.socket)) as connection:
                connection.request(method, path, json.dumps(body) if body is not None else None, headers)
                answer = connection.getresponse()
                text = answer.read()
        except (OSError, http.client.HTTPException):
            return 0, {}
        said = json.loads(text)
        gone = "nothing is in force" in said.get("reason", "") and "it has just ended" in said["reason"]
        assert answer.status < 500 or said["code"] == "unsupported" or gone, text
        return answer.status, said

    def start_agent(self) -> None:
        if self.pid is not None:
            return
        self.pid = self.zygote.agent(self.namespace, self.config, self.log)
        until(self._answers, "the agent answers", LIVES_S)
        for fault in self.faults.values():
            fault.over = True  # a new agent has taken back what it found

    def _answers(self) -> bool:
        assert self.pid is not None
        if not _lives(self.pid):
            pid, self.pid = self.pid, None
            raise AssertionError(f"the agent (pid {pid}) ended at its start: {self.text()}")
        return self.ask("GET", "/healthz")[0] == 200

    def kill_agent(self) -> None:
        if self.pid is not None:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pid, self.pid = self.pid, None
                raise AssertionError(f"the agent (pid {pid}) has ended by itself: {self.text()}") from None
            # Its first thread, as `kill -9` and whoever looks see it: the next agent must not mind the rest.
            until(lambda: not _lives(self.pid), "the agent is dead", LIVES_S)
            self.pid, self.frozen = None, False

    def end_agent(self) -> None:
        if self.pid is None:
            return
        self.thaw()
        os.kill(self.pid, signal.SIGTERM)
        until(lambda: not _lives(self.pid), f"the agent ends: {self.text()}", LIVES_S)
        self.pid = None
        assert not self.open(), f"it has ended and left {self.open()}"
        for fault in self.faults.values():
            fault.over = True

    def freeze(self) -> None:
        if self.pid is not None and not self.frozen:
            os.kill(self.pid, signal.SIGSTOP)
            self.frozen = True

    def thaw(self) -> None:
        if self.pid is not None and self.frozen:
            os.kill(self.pid, signal.SIGCONT)
        self.frozen = False

    def kill_watchdog(self) -> None:
        self.thaw()
        status, view = self.ask("GET", "/v1/node")
        if status == 200 and (watchdog := view["agent"]["watchdog_pid"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(watchdog, signal.SIGKILL)
            # Else the agent may still tell of the one that is ending, and be killed itself before it has another.
            until(lambda: not _lives(watchdog), "the watchdog has ended", LIVES_S)

    def inject(self, dies_after_s: float | None = None) -> str:
        """A fault of any kind, with an agent that is killed so long after the request, if at all."""
        self.thaw()
        kind = self.rng.choice(sorted(WISHES))
        target, params = WISHES[kind]
        duration_s = self.rng.choice((0.4, 1.0, 3.0, 60.0))
        dead_man_s = self.rng.choice((None, None, 1.0, 2.0))
        nic = self.rng.choice(RAILS) if target == "nic" else ""
        wish = {"kind": kind, "duration_s": duration_s, "params": params, "dead_man_s": dead_man_s}
        wish |= {"nic": nic or None, "replica": "r1" if target == "replica" else None}
        wish |= {"allow_last_rail": self.rng.random() < 0.5, "allow_last_replica": True}
        said = f"inject {kind} {nic} for {duration_s:g} s, dead man {dead_man_s}"
        asked = time.monotonic()
        answers: list[tuple[int, Any]] = []
        if dies_after_s is None:
            answers = [self.ask("POST", "/v1/faults", wish)]
        else:
            thread = threading.Thread(target=lambda: answers.append(self.ask("POST", "/v1/faults", wish)))
            thread.start()
            time.sleep(dies_after_s)
            self.kill_agent()
            thread.join()
            said += f", killed after {dies_after_s * 1000:.0f} ms"
        status, answer = answers[0]
        if status != 200:
            return f"{said}: {answer.get('code', 'no answer')}"
        lasts = min(duration_s, dead_man_s if dead_man_s is not None else duration_s)
        if answer["state"] == "active":
            self.faults[answer["id"]] = Known(answer["id"], kind, nic, answer["undo"], asked + lasts)
            if dead_man_s is not None and self.controller is not None and self.controller.poll() is None:
                assert self.controller.stdin is not None
                print(answer["id"], file=self.controller.stdin, flush=True)
        return f"{said}: {answer['id']} {answer['state']}"

    def revert(self) -> str:
        """One that is known, or all."""
        self.thaw()
        if not self.faults:
            return "revert nothing"
        fault = self.rng.choice([*self.faults.values(), None])
        path = f"/v1/faults/{fault.id}/revert" if fault else "/v1/faults/revert-all"
        status, answer = self.ask("POST", path)
        if status == 200:
            assert all(f["state"] in ("reverted", "done") for f in answer["faults"]), answer
            for known in [fault] if fault else self.faults.values():
                known.over = True
        return f"revert {fault.id if fault else 'all'}: {status}"

    def start_controller(self) -> None:
        if self.controller is None or self.controller.poll() is not None:
            command = [sys.executable, "-S", str(HERE / "controller.py"), str(self.socket), f"Bearer {TOKENS['chaos']}"]
            self.controller = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def kill_controller(self) -> None:
        if self.controller is not None:
            self.controller.kill()
            self.controller.wait()
            if self.controller.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self.controller.stdin.close()
            self.controller = None

    def administrator(self) -> str:
        """Somebody else's work on the same node."""
        self._theirs += 1
        what = self.rng.choice(("table", "route", "address", "queue"))
        with self.namespace.entered(), IPRoute() as ipr:
            index = self._indexes["mgmt0"]
            if what == "table":
                self._nft("add", "table", "netdev", f"admin{self._theirs}")
            elif what == "route":
                ipr.route("add", dst=f"10.{100 + self._theirs}.0.0/16", gateway="10.77.3.2", oif=index)
            elif what == "address":
                ipr.addr("add", index=index, address=f"10.79.{self._theirs}.1", prefixlen=24)
            else:
                ipr.tc("replace", kind="pfifo", index=index, handle=0x30000, limit=100 + self._theirs)
        now = self.look()
        self.before |= {key: value for key, value in now.items() if key.startswith("theirs")}
        return f"administrator: {what}"

    def _nft(self, *words: str) -> str:
        done = subprocess.run(["nft", *words], check=True, capture_output=True, text=True)
        return done.stdout

    # --- what must hold -------------------------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """All that a fault could leave behind, or break."""
        seen: dict[str, Any] = {}
        with self.namespace.entered(), IPRoute() as ipr:
            shown = pictures(ipr, self._indexes.values())
            queues: dict[int, list[str]] = {index: [] for index in self._indexes.values()}
            for m in ipr.get_qdiscs():
                if m["index"] in queues:
                    queues[m["index"]].append(f"{m.get('kind')} {m['handle']:x} {m['parent']:x} {m.get('options')}")
            for name, index in self._indexes.items():
                whose = "theirs" if name == "mgmt0" else "rail"
                ipv6 = [
                    f"{word} {Path('/proc/sys/net/ipv6/conf', name, word).read_text().strip()}"
                    for word in ("accept_ra", "addr_gen_mode", "disable_ipv6", "keep_addr_on_down", "mtu")
                ]
                seen[f"{whose} {name}"] = (sorted(shown[index]), sorted(queues[index]), ipv6)
            tables = _tables(self._nft("list", "ruleset"))
        seen["theirs tables"] = [text for name, text in tables if not name.startswith("ftctl_")]
        seen["tables"] = sorted(name for name, _ in tables if name.startswith("ftctl_"))
        scratch = self.root / "state" / "scratch"
        seen["files"] = sorted(p.name for p in scratch.iterdir()) if scratch.is_dir() else []
        seen["stopped"] = sorted(pid for pid, state in self.processes().items() if state in "Tt" and pid != self.pid)
        seen["theirs cgroups"] = (_cgroup(os.getpid()), _cgroup(self.pid) if self.pid else _cgroup(os.getpid()))
        return seen

    def processes(self) -> dict[int, str]:
        """Those of this node, by what their command lines name; with the kernel's letter for what they do."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if str(self.root).encode() in (path / "cmdline").read_bytes():
                    found[int(path.name)] = (path / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
        return {pid: state for pid, state in found.items() if state != "Z" and pid != self._controller_pid()}

    def _controller_pid(self) -> int:
        return self.controller.pid if self.controller is not None else -1

    def open(self) -> list[Entry]:
        content = self.ledger.read()
        assert content.damaged == ()
        return [entry for entry in content.entries if entry.open]

    def check(self) -> None:
        """After everything that happens, whoever is alive. What a revert has just set up again may take a moment: IPv6
        looks for duplicates of its addresses first."""
        deadline = time.monotonic() + 30
        while True:
            seen, unexplained = self._unexplained()
            touched = [key for key in unexplained if key.startswith("theirs")]
            told = {key: (self.before[key], seen[key]) for key in unexplained}
            assert not touched, f"somebody else's was touched: {told}"
            if not unexplained:
                break
            assert time.monotonic() < deadline, f"in force, and no record knows it: {told}"
            time.sleep(0.1)
        now = time.monotonic()
        for fault in self.faults.values():
            if fault.over:
                assert not self._visible(fault, seen), f"{fault} is over, and there"
            elif now < fault.until_s and fault.kind not in ("link-flap", "proc-slow"):
                assert self._visible(fault, seen) is not False, f"{fault} is in force, and not to be seen"

    def _unexplained(self) -> tuple[dict[str, Any], list[str]]:
        """What there is, and the parts of it that differ from before without an open record that knows of them."""
        explained = self.open()
        seen = self.look()
        explained += self.open()
        undo = "\n".join(bytes(entry.undo).decode() for entry in explained)
        found = []
        for key in (key for key, value in seen.items() if value != self.before[key]):
            names = seen[key] if key in ("tables", "files", "stopped") else [key.removeprefix("rail ")]
            if key.startswith("theirs") or any(str(name) not in undo for name in names):
                found.append(key)
        return seen, found

    def _visible(self, fault: Known, seen: dict[str, Any]) -> bool | None:
        """None where it cannot be told from another fault."""
        if fault.kind in ("link-blackhole", "link-loss", "partition"):
            return fault.undo[0].split()[-1] in seen["tables"]
        others = [f for f in self.faults.values() if f is not fault and not f.over]
        unknown = bool([entry for entry in self.open() if entry.id != fault.id]) or bool(others)
        if fault.kind == "link-down":
            down = "up False" in seen[f"rail {fault.nic}"][0]
            return down if not (unknown and down and fault.over) else None
        if fault.kind == "proc-hang":
            stopped = bool(seen["stopped"])
            return stopped if not (unknown and stopped and fault.over) else None
        return None

    def finish(self) -> str:
        """However it ends, everything is as before."""
        how = self.rng.choice(("time", "end", "anew"))
        self.kill_controller()
        left = max((entry.due_boot_s() for entry in self.open()), default=0.0) - time.clock_gettime(time.CLOCK_BOOTTIME)
        if how == "time" and self.pid is not None and left < 4:
            self.thaw()
            if self.rng.random() < 0.5:
                until(lambda: self.ask("GET", "/v1/node")[1]["agent"]["watchdog_pid"], "there is a watchdog", LIVES_S)
                self.kill_agent()
            until(lambda: not self.open(), "the time of every fault is up", LIVES_S)
        elif how == "end" and self.pid is not None:
            self.end_agent()
        else:
            how = "anew"
            self.kill_agent()
            self.start_agent()
        assert not self.open()
        for fault in self.faults.values():
            fault.over = True
        self._as_before()
        self.start_agent()
        self.end_agent()
        self._as_before()
        until(lambda: not self.processes(), f"no process is left: {self.processes()}", LIVES_S)
        return f"finish: {how}"

    def _as_before(self) -> None:
        """Addresses of IPv6 come back a moment after their link."""
        with contextlib.suppress(AssertionError):
            until(lambda: self.look() == self.before, "", 30.0)
        seen = self.look()
        differs = {key: (self.before[key], value) for key, value in seen.items() if value != self.before[key]}
        assert not differs, differs

    def text(self) -> str:
        return self.log.read_text()[-3000:] if self.log.exists() else ""

    def close(self) -> None:
        self.kill_controller()
        for pid in (*filter(None, [self.pid]), *self.processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.namespace.close()
        shutil.rmtree(self.root, ignore_errors=True)


def _has_link_local(ipr: IPRoute, index: int) -> bool:
    """The kernel gives a device its own address when it hears of the carrier, at times a second later."""
    return any(message.get("address", "").startswith("fe80:") for message in ipr.get_addr(index=index, family=10))


def add_routes_of(ipr: IPRoute, index: int, number: int) -> None:
    if number == 0:
        add_routes(ipr, index, 0)
    else:
        ipr.route("add", dst="10.98.0.0/16", gateway=f"10.77.{number}.2", oif=index)


def _tables(ruleset: str) -> list[tuple[str, str]]:
    """Each by name and as nft shows it."""
    found = re.findall(r"^(table \w+ (\S+) \{\n.*?^\})$", ruleset, re.MULTILINE | re.DOTALL)
    return [(name, text) for text, name in found]


def _lives(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _cgroup(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""
