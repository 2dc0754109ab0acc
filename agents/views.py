"""From what the agent knows to what it publishes."""

from __future__ import annotations

import time
from dataclasses import asdict

from agents.api.models import (
    AgentInfo,
    FaultParam,
    FaultSpec,
    FaultView,
    NodeView,
    ProblemView,
)
from agents.api.protect import Protection
from agents.api.safety import BlastView, ProtectView
from agents.faults.catalog import AnyFault
from agents.health import views as verdict_views
from agents.http.context import VERSION, Agent
from agents.injection.control import FaultControl
from agents.injection.ledger import Entry
from agents.monitors import problems

SHOWN_AFTER_REVERT_S = 60.0


def fault_view(entry: Entry, injector: FaultControl) -> FaultView:
    return FaultView(
        id=entry.id,
        kind=entry.kind,
        node=entry.target.node,
        target=str(entry.target),
        state=entry.state,
        owner=entry.owner,
        reason=entry.reason,
        created=entry.created,
        duration_s=entry.duration_s,
        ttl_left_s=injector.left_s(entry),
        detail=entry.detail,
        undo=injector.by_hand(entry) if entry.open else [],
        irreversible=entry.irreversible,
        warning=entry.warning,
        params=dict(entry.params),
        request_id=entry.request_id,
    )


def fault_spec(fault: AnyFault, unsupported: str) -> FaultSpec:
    return FaultSpec(
        kind=fault.kind,
        summary=fault.summary,
        target=fault.target,
        params=[
            FaultParam(
                name=param.name,
                type=param.type,
                unit=param.unit,
                required=param.default is None,
                default=param.default,
                help=param.help,
                minimum=param.minimum,
                maximum=param.maximum,
                choices=list(param.choices),
            )
            for param in fault.params
        ],
        irreversible=fault.irreversible,
        supported=not unsupported,
        unsupported_reason=unsupported,
    )


def fault_specs(agent: Agent) -> list[FaultSpec]:
    injector = agent.parts.injector
    return [fault_spec(fault, injector.unsupported(fault)) for fault in agent.catalog.values()]


def recent_faults(agent: Agent) -> list[FaultView]:
    """Open ones, and those reverted in the last minute."""
    injector = agent.parts.injector
    now = time.time()
    entries = [e for e in injector.entries() if e.open or abs(now - (e.reverted or 0)) <= SHOWN_AFTER_REVERT_S]
    return [fault_view(entry, injector) for entry in entries]


def node_view(agent: Agent) -> NodeView:
    """From memory only: it never waits for kernel, disk or network."""
    snapshot = agent.poller.snapshot()
    name = agent.settings.node
    verdicts = agent.parts.health.verdicts()
    gpus = verdict_views.of_gpus(agent.gpus.summary(), verdicts)
    processes = [*agent.parts.processes(), *snapshot.processes]
    faults = recent_faults(agent)
    trouble = agent.poller.trouble()
    found = [
        *problems.of_ledger(name, agent.parts.injector.damaged()),
        *problems.of_helper(name, agent.parts.injector.trouble()),
        *problems.of_faults(faults),
        *([ProblemView(object=name, reason=trouble, action=f"look at the agent's log on {name}")] if trouble else []),
        *problems.advised(problems.of_verdicts(verdicts), agent.policy.recommendations()),
        *problems.of_processes(processes),
    ]
    return NodeView.model_validate(
        {
            "schema": 1,
            "name": name,
            "time": time.time(),
            "agent": agent_info(agent),
            "nics": verdict_views.of_nics(snapshot.nics, verdicts),
            "gpus": gpus,
            "ranks": agent.parts.ranks(),
            "processes": processes,
            "link_processes": agent.links.views(),
            "cordon": agent.cordon.view(),
            "halt": agent.halt.view(),
            "protect": [_protect(one) for one in agent.parts.injector.protections()],
            "blast": BlastView(**asdict(agent.parts.injector.blast())),
            "faults": faults,
            "problems": found,
        }
    )


def _protect(rules: Protection) -> ProtectView:
    nodes, nics, replicas = list(rules.nodes), list(rules.nics), list(rules.replicas)
    return ProtectView(nodes=nodes, nics=nics, replicas=replicas, source=rules.source)


def agent_info(agent: Agent) -> AgentInfo:
    snapshot = agent.poller.snapshot()
    return AgentInfo(
        pid=agent.pid,
        age_s=time.monotonic() - agent.started_at,
        version=VERSION,
        rss_mb=snapshot.rss_mb,
        cpu_percent=snapshot.cpu_percent,
        allow_faults=agent.faults,
        watchdog_pid=agent.kennel.pid,
    )
