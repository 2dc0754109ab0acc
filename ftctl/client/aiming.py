"""What must be known of the cluster before a fault can be asked for: where the coordinator runs, addresses."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agents.api.blast import FELT_BY_NOBODY
from agents.api.models import FaultView, InjectRequest, NodeView
from ftctl.client import fleet
from ftctl.client.agent import AgentClient
from ftctl.client.selection import nodes_named, rail_addresses
from ftctl.errors import CliError

if TYPE_CHECKING:
    from agents.api.faultspecs import ParamValue, Spec
    from ftctl.client.cluster import Agents

LOOK_S = 2.0  # all agents together may take so long to say what is in force; who is silent counts as hit


async def where_the_coordinator_is(agents: Agents, kind: str, nodes: Sequence[str]) -> str:
    """The first node whose agent finds the coordinator among its processes. Raises CliError."""
    question = InjectRequest(kind=kind, dry_run=True)

    async def try_it(client: AgentClient) -> FaultView:
        return await client.inject(question)

    answers = await agents.each(try_it, nodes)
    found = next((node for node, answer in answers.items() if not isinstance(answer, CliError)), None)
    if found is None:
        raise next(answer for answer in answers.values() if isinstance(answer, CliError))
    return found


async def with_addresses(agents: Agents, spec: Spec, params: Mapping[str, ParamValue]) -> dict[str, ParamValue]:
    """Nodes where addresses are wanted: those of their rails. Raises CliError."""
    result = dict(params)
    for param in spec.params:
        text = str(params.get(param.name, ""))
        if param.type != "addresses" or not text:
            continue
        try:
            for part in text.split(","):
                ipaddress.ip_address(part.strip())
        except ValueError:
            views = await agents.each(AgentClient.view, nodes_named(agents.inventory, text, param.option))
            result[param.name] = ",".join(rail_addresses(views))
    return result


async def with_fleet(agents: Agents, requests: Mapping[str, InjectRequest]) -> dict[str, InjectRequest]:
    """Each with what is in force on the other nodes, and what is to be with it: that counts against the limits too."""
    if all(request.kind in FELT_BY_NOBODY for request in requests.values()):
        return dict(requests)
    answers = await agents.each(AgentClient.view, within_s=min(LOOK_S, agents.timeout_s))
    views = {name: answer if isinstance(answer, NodeView) else None for name, answer in answers.items()}
    asked = {node: fleet.of_request(request, node, views.get(node)) for node, request in requests.items()}
    found = dict(requests)
    for node, request in requests.items():
        if fleet.knows_limits(views.get(node)):
            more = [hit for other, hit in asked.items() if other != node and hit is not None]
            found[node] = request.model_copy(update={"fleet": fleet.said(views, more)})
    return found
