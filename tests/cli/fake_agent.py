"""Agents for tests of ftctl: real HTTP on real Unix sockets, answers of the published contract, states set by hand."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.api import cordon, evidence, halt, policy, policyfile, safety
from agents.api import models as m
from agents.host.linksockets import LinkAnswer, LinkSocket
from agents.monitors.links import LinkBook

from .fake_job import FakeJob, replica
from .fake_server import TOKEN, FakeServer, refuse

MAX_DURATION_S = 900.0
NOW = 1000.0  # of the looks at links


def nic(name: str, **change: Any) -> m.NicView:
    base: dict[str, Any] = {
        "name": name,
        "role": "rail",
        "present": True,
        "up": True,
        "carrier": True,
        "speed_mbit": 10000,
        "addresses": ["10.1.0.1/24"],
        "state": m.Health.HEALTHY,
    }
    return m.NicView(**{**base, **change})


class FakeAgent(FakeServer):
    def __init__(self, cluster: FakeCluster, name: str, path: Path) -> None:
        super().__init__(name, path)
        self.cluster = cluster
        self.nics = [nic("rail0"), nic("rail1"), nic("mgmt0", role="mgmt")]
        self.faults: list[m.FaultView] = []
        self.events: list[m.EventRecord] = []
        self.boot = "b1"
        self.processes = [
            m.ProcessView(replica=f"r{name[-1]}", rank=0, pid=1000, state="running", log=f"/logs/{name}.log")
        ]
        self.problems: list[m.ProblemView] = []
        self.cordon: cordon.CordonView | None = None
        self.halt: halt.HaltView | None = None
        self.policy_mode = "observe"
        self.gpus = m.GpuSummary(note="no GPUs (NVML not found)")
        self.stacks: list[evidence.RankStacks] = []
        self.links = LinkBook(0.0)
        self.reports_links = True  # of its ranks
        self.blast: safety.BlastView | None = None  # as an agent that knows no such limits
        self.asked: list[m.InjectRequest] = []
        self.before_inject_answer: Callable[[], None] = lambda: None
        self.cancelled: set[str] = set()
        self.revert_state = m.FaultState.REVERTED

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> Any:
        if method == "GET":
            after = int(query.get("after", ["0"])[0])
            if path == "/v1/node":
                return self.view()
            if path == "/v1/faults":
                return self.faults
            if path == "/v1/fault-kinds":
                return [
                    m.FaultSpec(kind="noop", summary="nothing", target="none"),
                    m.FaultSpec(kind="link-down", summary="a rail goes down", target="nic"),
                    m.FaultSpec(
                        kind="solar-flare",  # this ftctl does not know it
                        summary="too much sun",
                        target="node",
                        params=[
                            m.FaultParam(name="strength", type="float", required=True, unit="suns"),
                            m.FaultParam(name="aurora", type="bool", default=False),
                        ],
                    ),
                ]
            if path == "/v1/policy":
                read = policyfile.read()
                return policy.PolicyAnswer(
                    node=self.name,
                    mode=self.policy_mode,
                    mode_by="configuration",
                    source="default",
                    limits=dataclasses.asdict(read.limits),
                    rules=[dataclasses.asdict(rule) for rule in read.rules],
                )
            if path == "/v1/events":
                return self._events(after, float(query.get("wait_s", ["0"])[0]))
            if path == "/v1/links":
                asked = {name: values[0] for name, values in query.items()}
                rows = self.links.rows(
                    pid=int(asked["pid"]) if "pid" in asked else None,
                    rail=asked.get("rail", ""),
                    state=asked.get("state", ""),
                    each=asked["each"] == "true",
                )
                return m.LinksAnswer(links=rows)
            if path == "/v1/job":
                return self._job().view()
            if path == "/v1/job/events":
                events = [e for e in self._job().events if e.seq > after]
                return m.EventsAnswer(events=events, last=max([0, *(e.seq for e in events)]), boot="c1")
        if method == "POST":
            parts = path.strip("/").split("/")
            if path in ("/v1/node/cordon", "/v1/node/uncordon"):
                return self._set_apart(path, cordon.CordonRequest.model_validate_json(body))
            if path == "/v1/policy/mode":
                mode = policy.ModeRequest.model_validate_json(body).mode
                before, self.policy_mode = self.policy_mode, str(mode)
                return policy.ModeAnswer(mode=mode, changed=before != mode)
            if path in ("/v1/faults/halt", "/v1/faults/allow"):
                return self._halt(path, halt.HaltRequest.model_validate_json(body))
            if path == "/v1/faults":
                if self.halt is not None:
                    reason = f"faults are halted on {self.name} by {self.halt.by}: {self.halt.reason}"
                    raise refuse("refused", self.name, reason, "ftctl faults allow --reason TEXT")
                return self._inject(m.InjectRequest.model_validate_json(body))
            if path == "/v1/faults/revert-all":
                return self._revert([f for f in self.faults if f.state is not m.FaultState.REVERTED])
            if parts[:2] == ["v1", "faults"] and parts[3:] == ["keepalive"]:
                alive = [f for f in self.faults if f.id == parts[2] and f.state is m.FaultState.ACTIVE]
                if not alive:
                    raise refuse("conflict", f"fault {parts[2]}", "is over")
                return alive[0]
            if parts[:2] == ["v1", "faults"] and parts[3:] == ["revert"]:
                found = [f for f in self.faults if parts[2] in (f.id, f.request_id)]
                if not found:
                    self.cancelled.add(parts[2])
                    raise refuse("unknown-fault", f"fault {parts[2]}", "unknown here")
                return self._revert(found)
            if parts[:2] == ["v1", "replicas"] and parts[3:] == ["stacks"]:
                wish = evidence.StacksRequest.model_validate_json(body)
                found = [s for s in self.stacks if s.replica == parts[2] and wish.rank in (None, s.rank)]
                if not found:
                    raise refuse("unknown-replica", f"replica {parts[2]}", f"no process of it on {self.name}")
                return evidence.StacksAnswer(ranks=found)
            if parts[:3] == ["v1", "job", "replicas"]:
                return self._act(parts[4], parts[3], m.ReplicaAction.model_validate_json(body))
            if parts[:2] == ["v1", "replicas"] and parts[3] in ("start", "stop", "restart", "rejoin"):
                self._job().supervised.append((self.name, parts[3], parts[2]))
                m.SupervisionAction.model_validate_json(body)
                return m.ActionAnswer(code="ok", text=f"replica {parts[2]}: {parts[3]} is under way")
            if path == "/v1/job/force-quorum":
                m.CoordinatorAction.model_validate_json(body)
                self._job()
                return m.ActionAnswer(code="ok", text="settled without r2")
        raise refuse("not-found", path, "no such route")

    def sees_links(self, *processes: tuple[int, bytes], now: float = NOW) -> None:
        """One look at processes (pid, document); an empty document: it does not answer."""
        answers = [
            LinkAnswer(LinkSocket(pid, f"@ftar-links/{pid}/0"), pid, 0, data, "" if data else "no answer within 0.8 s")
            for pid, data in processes
        ]
        self.links.take(now, answers, lambda _pid: True)

    # --- behaviour ---------------------------------------------------------------------------------------------------

    def view(self) -> m.NodeView:
        return m.NodeView(
            schema=1,
            name=self.name,
            time=time.time(),
            agent=m.AgentInfo(
                pid=77, age_s=12.5, version="0.1.0", rss_mb=40.0, cpu_percent=0.3, allow_faults=True, watchdog_pid=78
            ),
            nics=self.nics,
            blast=self.blast,
            gpus=self.gpus,
            ranks=[
                m.RankView(
                    job="main",
                    replica=p.replica,
                    rank=p.rank,
                    pid=p.pid or 0,
                    node=self.name,
                    state="contributing",
                    step=100,
                    term=1,
                    epoch=7,
                    contributors=["r0", "r1", "r2"],
                    links=[
                        m.LinkView(
                            peer="r9",
                            rail="rail0",
                            direction="out",
                            state="UP",
                            active=True,
                            reason="healthy",
                            since_s=60.0,
                            flaps=0,
                            resumes=0,
                            bytes=1,
                        )
                    ]
                    if self.reports_links
                    else [],
                )
                for p in self.processes
                if p.state == "running"
            ],
            processes=self.processes,
            link_processes=self.links.views(NOW),
            cordon=self.cordon,
            halt=self.halt,
            faults=self.faults,
            problems=self.problems,
        )

    def _job(self) -> FakeJob:
        if self.cluster.uncoordinated:
            raise refuse("no-coordinator", "coordinator", "this agent knows no coordinator")
        if self.cluster.job is None:
            raise refuse("coordinator", "job main", "nobody listens on 10.0.0.1:7600", "ftctl coordinator status")
        return self.cluster.job

    def _events(self, after: int, wait_s: float) -> m.EventsAnswer:
        until = time.monotonic() + min(wait_s, 30)
        while True:
            found = [e for e in self.events if e.seq > after]
            if found or time.monotonic() >= until or self.down.wait(0.02):
                return m.EventsAnswer(events=found, last=max([0, *(e.seq for e in self.events)]), boot=self.boot)

    def _inject(self, request: m.InjectRequest) -> m.FaultView:
        self.asked.append(request)
        if request.request_id in self.cancelled:
            raise refuse("refused", self.name, "this request was taken back before it arrived")
        if not 0 < request.duration_s <= MAX_DURATION_S:
            raise refuse("bad-duration", "duration", f"{request.duration_s:g} s is not in (0, {MAX_DURATION_S:g}]")
        if request.kind == "link-down":
            found = next((n for n in self.nics if n.name == request.nic), None)
            if found is None:
                raise refuse("unknown-nic", f"{self.name}/{request.nic}", "no such network device", "ftctl status")
            if found.role != "rail":
                raise refuse("refused", f"{self.name}/{request.nic}", "not declared as a rail")
            if not found.up:
                raise refuse("refused", f"{self.name}/{request.nic}", "it is down already")
        view = self.fault(f"{self.name}/{request.nic}" if request.nic else self.name, request)
        if not request.dry_run:
            self.faults.append(view)
            self.nics = [
                n.model_copy(update={"up": False, "carrier": False, "injected": True}) if n.name == request.nic else n
                for n in self.nics
            ]
        self.before_inject_answer()
        return view

    def fault(self, target: str, request: m.InjectRequest, **change: Any) -> m.FaultView:
        base: dict[str, Any] = {
            "id": f"f-{self.name}-{len(self.faults)}",
            "kind": request.kind,
            "node": self.name,
            "target": target,
            "state": m.FaultState.ACTIVE,
            "owner": "operator",
            "reason": request.reason,
            "created": time.time(),
            "duration_s": request.duration_s,
            "ttl_left_s": request.duration_s,
            "undo": ["ip link set rail0 up"],
            "request_id": request.request_id,
            "params": request.params,
        }
        return m.FaultView(**{**base, **change})

    def _set_apart(self, path: str, wish: cordon.CordonRequest) -> cordon.CordonAnswer:
        before = self.cordon
        view = None
        if path == "/v1/node/cordon":
            view = before or cordon.CordonView(by="operator", reason=wish.reason, since=time.time())
        if not wish.dry_run:
            self.cordon = view
        return cordon.CordonAnswer(changed=(before is None) != (view is None), cordon=view)

    def _halt(self, path: str, wish: halt.HaltRequest) -> halt.HaltAnswer:
        before = self.halt
        if path == "/v1/faults/allow":
            self.halt = None
            return halt.HaltAnswer(changed=before is not None)
        self.halt = before or halt.HaltView(by="operator", reason=wish.reason, since=time.time())
        after = self._revert([f for f in self.faults if not f.state.over])
        return halt.HaltAnswer(changed=before is None, halt=self.halt, faults=after.faults)

    def _revert(self, chosen: list[m.FaultView]) -> m.RevertAnswer:
        after = []
        for fault in chosen:
            new = fault.model_copy(update={"state": self.revert_state, "detail": "probed", "ttl_left_s": 0.0})
            self.faults[self.faults.index(fault)] = new
            after.append(new)
        if self.revert_state is m.FaultState.REVERTED:
            self.nics = [n.model_copy(update={"up": True, "carrier": True, "injected": False}) for n in self.nics]
        return m.RevertAnswer(faults=after)

    def _act(self, verb: str, name: str, request: m.ReplicaAction) -> m.ActionAnswer:
        job = self._job()
        if name not in job.replicas:
            raise refuse("unknown-replica", f"replica {name}", "unknown in job main")
        contributing = [r for r in job.replicas.values() if r.state == "contributing"]
        if verb == "drain" and len(contributing) <= job.min_replicas and not request.force:
            raise refuse("refused", f"replica {name}", "min-replicas would not be kept", "--force overrides")
        job.actions.append((self.name, verb, request))
        if not request.dry_run:
            after = {"drain": "drained", "evict": "evicted", "rejoin": job.after_rejoin}[verb]
            job.set(name, after, reason=request.reason)
        return m.ActionAnswer(code="ok", text=f"{verb} of {name} accepted")


class FakeCluster:
    """Three nodes with a replica each, on sockets under `folder`, and the inventory that names them."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self.folder = folder
        self.uncoordinated = False  # no coordinator is configured
        self.agents = {f"node{i}": FakeAgent(self, f"node{i}", folder / f"n{i}.sock") for i in range(nodes)}
        self.job: FakeJob | None = FakeJob({f"r{i}": replica(f"r{i}", f"node{i}") for i in range(nodes)})
        token = folder / "token"
        token.write_text(TOKEN + "\n")
        token.chmod(0o600)
        self.inventory = folder / "inventory.yaml"
        lines = ["version: 1", "job: main", "token_file: token", "nodes:"]
        lines += [f"  - {{name: {name}, url: 'unix://{agent.path.name}'}}" for name, agent in self.agents.items()]
        self.inventory.write_text("\n".join(lines) + "\n")

    def __getitem__(self, node: str) -> FakeAgent:
        return self.agents[node]

    def start(self) -> None:
        for agent in self.agents.values():
            agent.start()

    def stop(self) -> None:
        for agent in self.agents.values():
            agent.stop()
