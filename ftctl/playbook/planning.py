"""`ftctl chaos plan`: all reads and checks that a run would make, and nothing else. Says what would be done where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from agents.api.models import ReplicaAction
from ftctl.client import fleet, injection, replicas
from ftctl.client.cluster import Agents, Snapshot
from ftctl.errors import CliError
from ftctl.exit_codes import ExitCode, most_urgent
from ftctl.playbook import schema as s
from ftctl.playbook.actions import sentence
from ftctl.playbook.asking import aim_of, request_for
from ftctl.playbook.expressions import evaluate
from ftctl.playbook.facts import look
from ftctl.playbook.moments import LATE_S
from ftctl.playbook.rules import Rules, rules_of
from ftctl.playbook.schema import Playbook
from ftctl.playbook.selecting import Aim, pick_replica
from ftctl.playbook.together import Asked, conflict


@dataclass(frozen=True)
class Line:
    """One thing that would be done. `code` other than OK: it would not go through, and `says` why."""

    phase: str  # steady state | method | clean-up
    what: str
    where: str
    says: str
    code: ExitCode = ExitCode.OK


@dataclass(frozen=True)
class _Cluster:
    """What all lines of a plan go by."""

    agents: Agents
    snapshot: Snapshot
    rng: Random
    rules: Rules
    beside: list[Asked] = field(default_factory=list)  # of the parallel group that is looked at: what it would make


async def plan(playbook: Playbook, agents: Agents, *, seed: int, environment: str, file: str) -> list[Line]:
    snapshot = await agents.snapshot()
    cluster = _Cluster(agents, snapshot, Random(f"{seed}/{playbook.name}"), rules_of(playbook, file))
    lines: list[Line] = []
    if environment not in playbook.environments:
        why = f"refused: this cluster's environment is {environment or 'not named'}"
        lines.append(Line("environment", ", ".join(playbook.environments), "", why, ExitCode.REFUSED))
    lines += [await _probe(probe, snapshot, agents) for probe in playbook.steady_state]
    for phase, actions in (("method", playbook.method), ("clean-up", playbook.cleanup)):
        for action in actions:
            lines += await _action(phase, action, replace(cluster, beside=[]))
    lines.append(Line("clean-up", "revert every fault of this run", "", "always"))
    return lines


async def _probe(probe: Any, snapshot: Snapshot, agents: Agents) -> Line:
    if not isinstance(probe, s.Expect):
        return Line("steady state", sentence(probe), "this machine", "not tried in a plan")
    finding = evaluate(probe.expect, await look(agents, probe.expect, snapshot))
    code = ExitCode.OK if finding.met else ExitCode.NO_STEADY_STATE
    return Line(
        "steady state", str(probe.expect), "", finding.sentence if finding.met else f"not met: {finding.sentence}", code
    )


async def _action(phase: str, action: Any, cluster: _Cluster) -> list[Line]:
    at = getattr(action, "at", None)
    if at is not None and at.time is not None and at.time.unix is not None:
        left = at.time.left(began=0.0, now=cluster.agents.world.unix_time())
        if left < -LATE_S:
            return [Line(phase, sentence(action), "", f"would not be done: {at.time} is over", ExitCode.FAILED)]
    if isinstance(action, s.Parallel):
        group = replace(cluster, beside=[])
        return [line for inner in action.parallel for line in await _action(phase, inner, group)]
    if isinstance(action, s.Storm):
        first = Line(phase, sentence(action), "", "each of the mix, as it would be now:")
        return [first, *[await _fault(phase, fault, replace(cluster, beside=[])) for fault in action.storm.mix]]
    if isinstance(action, s.Fault):
        return [await _fault(phase, action, cluster)]
    for verb in ("drain", "evict", "rejoin"):
        if type(action) is s.VERBS[verb]:
            return [await _member(phase, verb, action, cluster)]
    where = "this machine" if isinstance(action, s.Command | s.Http) else ""
    return [Line(phase, sentence(action), where, "")]


async def _fault(phase: str, fault: s.Fault, cluster: _Cluster) -> Line:
    what = sentence(fault) if type(fault) in s.VERBS.values() else f"inject {fault.inject}"
    aim, agents = Aim(), cluster.agents
    try:
        aim = await aim_of(agents, fault, cluster.snapshot, cluster.rng)
        if not aim.node:
            raise CliError("", "where? the target names neither a node nor a replica", code=ExitCode.USAGE)
        request = await request_for(agents, fault, aim, "plan", cluster.rules, dry_run=True)
        views = {one.name: one.view for one in cluster.snapshot.nodes}
        if fleet.knows_limits(views.get(aim.node)):
            hits = [hit for other in cluster.beside if (hit := other.hit(views))]
            request = request.model_copy(update={"fleet": fleet.said(views, hits)})
        outcome = await injection.inject(agents, {aim.node: request})
        if error := outcome.errors.get(aim.node):
            raise error
        asked = Asked(request, aim.node)
        if cluster.beside and (why := conflict(asked, cluster.beside, views, cluster.snapshot.job)):
            raise CliError(str(asked), f"at the same time: {why.reason}", why.hint, ExitCode.REFUSED)
        cluster.beside.append(asked)
    except CliError as error:
        return Line(phase, what, str(aim), str(error), error.code)
    view = outcome.faults[aim.node]
    undo = f"undo: {'; '.join(view.undo)}" if view.undo else "irreversible" if view.irreversible else ""
    return Line(phase, what, str(aim), undo or "the agent would do it")


async def _member(phase: str, verb: str, action: Any, cluster: _Cluster) -> Line:
    name = who = getattr(action, verb)
    try:
        name = pick_replica(who, cluster.snapshot, cluster.rng)
        if verb == "rejoin":
            return Line(phase, f"rejoin {name}", name, "after what stands before it")
        request = ReplicaAction(reason="plan", dry_run=True, rejoin=getattr(action, "rejoin", True))
        answer = await replicas.act(cluster.agents, cluster.snapshot, verb, name, request)
    except CliError as error:
        return Line(phase, f"{verb} {who}", name, str(error), error.code)
    return Line(phase, f"{verb} {who}", name, answer.text or "the coordinator would do it")


def worst(lines: Sequence[Line]) -> ExitCode:
    return most_urgent(line.code for line in lines)


def document(line: Line) -> dict[str, str | int]:
    return {"phase": line.phase, "what": line.what, "where": line.where, "says": line.says, "code": int(line.code)}
