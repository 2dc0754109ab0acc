"""`ftctl inject KIND`: one command for each kind of fault that is published, with the options that this kind has.

A kind that is not published with this ftctl is asked for at the agents, which may be newer.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
import typer.main

from agents.api.faultspecs import NOT_OFFERED, SPECS, Param, ParamValue, Spec
from ftctl.context import current
from ftctl.exit_codes import ExitCode
from ftctl.kinds import OnPartial, Wish, command_of, command_of_unknown, described
from ftctl.options import plain_app, with_cluster, with_flags

if TYPE_CHECKING:
    from agents.api.models import FaultSpec, NodeView
    from ftctl.client.cluster import Agents, Cluster
    from ftctl.client.injection import Outcome
    from ftctl.config import Flags
    from ftctl.errors import CliError


class KindGroup(typer.core.TyperGroup):
    """The published kinds as commands, each made when it is asked for; any other name is a question to the agents."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(SPECS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        spec = SPECS.get(cmd_name)
        made = command_of(spec, _inject) if spec is not None else command_of_unknown(cmd_name, _inject_unknown)
        alone = plain_app()
        alone.command(cmd_name)(with_cluster(made))
        command = typer.main.get_command(alone)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Faults"):
            formatter.write_dl([(spec.kind, described(spec)) for spec in SPECS.values()])


app = typer.Typer(
    cls=KindGroup,
    rich_markup_mode=None,
    add_completion=False,
    help="Inject a fault that takes itself back.",
    invoke_without_command=True,
)


@app.callback()
@with_flags
def inject(
    flags: Flags,
    ctx: typer.Context,
    listing: Annotated[bool, typer.Option("--list", help="List the kinds of faults the agents know.")] = False,
) -> ExitCode | None:
    if listing:
        raise typer.Exit(_list_kinds(flags))
    if ctx.invoked_subcommand is None:
        current().say(ctx.get_help())
        raise typer.Exit(ExitCode.USAGE)
    return None


def _inject(cluster: Cluster, spec: Spec, wish: Wish) -> ExitCode:
    async def known(_agents: Agents) -> Spec:
        return spec

    if spec.target == "nic":
        _one_of_nic_and_rail(spec.kind, wish)
    return _run(cluster, spec.kind, wish, known)


def _inject_unknown(cluster: Cluster, kind: str, wish: Wish) -> ExitCode:
    from ftctl.errors import UsageProblem as Problem

    if kind in NOT_OFFERED:
        raise Problem(f"inject {kind}", f"not offered: {NOT_OFFERED[kind]}", "ftctl inject --list")

    async def ask(agents: Agents) -> Spec:
        from ftctl.client.agent import AgentClient
        from ftctl.client.selection import nodes_named
        from ftctl.errors import CliError, UsageProblem

        answers = await agents.each(AgentClient.fault_kinds, nodes_named(cluster.inventory, wish.node))
        lists = [answer for answer in answers.values() if isinstance(answer, list)]
        for published in (entry for answer in lists for entry in answer):
            if published.kind == kind:
                return _spec_of(published)
        for answer in answers.values():
            if isinstance(answer, CliError):
                raise answer
        names = sorted({entry.kind for answer in lists for entry in answer} | set(SPECS))
        near = difflib.get_close_matches(kind, names, n=1)
        hint = f"ftctl inject {near[0]} --help" if near else "ftctl inject --list"
        raise UsageProblem(f"inject {kind}", "there is no such fault, and no agent knows it", hint)

    return _run(cluster, kind, wish, ask)


def _one_of_nic_and_rail(kind: str, wish: Wish) -> None:
    from ftctl.errors import UsageProblem

    if (wish.nic is None) == (wish.rail is None):
        raise UsageProblem(f"inject {kind}", "say which link: either --nic NAME or --rail K", "ftctl status")


def _run(cluster: Cluster, kind: str, wish: Wish, find_spec: Any) -> ExitCode:
    from agents.api.blast import OVERRIDES
    from agents.api.models import InjectRequest
    from ftctl import durations
    from ftctl.client import injection
    from ftctl.client.aiming import with_addresses, with_fleet
    from ftctl.errors import UsageProblem
    from ftctl.render.injection import show

    try:
        duration_s = None if wish.duration is None else durations.parse(wish.duration)
    except durations.DurationError as error:
        raise UsageProblem("--duration", str(error)) from None
    if duration_s is not None and duration_s <= 0:
        text = f"{wish.duration}: a fault must last longer than nothing"
        raise UsageProblem("--duration", text, "for example 20s")

    _overrides(wish)

    async def work(agents: Agents) -> ExitCode:
        with injection.deferred("interrupted: taking back what was begun (at most 30 s) ...", agents) as interrupt:
            spec = await find_spec(agents)
            params = await with_addresses(agents, spec, wish.params or _typed(spec, wish.raw))
            nics = await _aims(cluster, agents, spec, wish)
            if interrupt.set:
                return await _undo(agents, injection.Outcome())
            more = {} if duration_s is None else {"duration_s": duration_s}
            requests = {
                node: InjectRequest(
                    kind=kind,
                    nic=nic,
                    replica=wish.replica,
                    rank=wish.rank,
                    reason=wish.reason,
                    params=params,
                    request_id=injection.new_request_id(),
                    dry_run=wish.dry_run,
                    allow_last_rail=wish.allow_last_rail,
                    allow_last_replica=wish.allow_last_replica,
                    override=[rule for rule in OVERRIDES if rule in wish.override] or None,
                    **more,
                )
                for node, nic in nics.items()
            }
            requests = await with_fleet(agents, requests)
            outcome = await injection.inject(agents, requests)
            partial = outcome.word == "partial" and not wish.dry_run and not interrupt.set
            if partial and wish.on_partial is OnPartial.REVERT:
                cluster.world.say("not all nodes have it: taking it back where it is ...")
                await injection.withdraw(agents, outcome)
            if not interrupt.set:
                show(cluster, outcome)
            if await interrupt.closed() and not wish.dry_run:
                return await _undo(agents, outcome)
        return outcome.code()

    return cluster.run(work)


def _overrides(wish: Wish) -> None:
    """Raises UsageProblem."""
    from agents.api.blast import OVERRIDES
    from ftctl.errors import UsageProblem

    for rule in wish.override:
        if rule not in OVERRIDES:
            name = rule.replace("-", "_")
            near = [one for one in OVERRIDES if one.startswith(name)] or difflib.get_close_matches(name, OVERRIDES, n=1)
            meant = f"did you mean {near[0]}?" if near else f"there are: {', '.join(OVERRIDES)}"
            raise UsageProblem(f"--override {rule}", f"there is no such rule ({meant})")
    lifted = {
        "--override": wish.override,
        "--allow-last-rail": wish.allow_last_rail,
        "--allow-last-replica": wish.allow_last_replica,
    }
    for option, given in lifted.items():
        if given and not wish.reason.strip():
            raise UsageProblem(option, "a reason is required", "--reason TEXT   (it is in ftctl audit)")


async def _aims(cluster: Cluster, agents: Agents, spec: Spec, wish: Wish) -> Mapping[str, str | None]:
    """The nodes that are asked, each with the NIC that is meant there (None where none is). Raises CliError: then
    nothing was sent to any node."""
    from ftctl.client.agent import AgentClient
    from ftctl.client.aiming import where_the_coordinator_is
    from ftctl.client.selection import nodes_named, nodes_of_replica, rail_device
    from ftctl.errors import CliError, UsageProblem

    everywhere = wish.node is None
    nodes = nodes_named(cluster.inventory, wish.node)
    if spec.target == "nic":
        _one_of_nic_and_rail(spec.kind, wish)
    if everywhere and spec.target in ("nic", "node", "gpu"):
        raise UsageProblem(f"inject {spec.kind}", "say where: --node NODES", "ftctl status")
    if spec.target == "replica" and wish.replica is None:
        raise UsageProblem(f"inject {spec.kind}", "say whose processes: --replica R", "ftctl status")
    if spec.target == "coordinator" and everywhere:
        return {await where_the_coordinator_is(agents, spec.kind, nodes): None}
    if wish.rail is None and not (spec.target == "replica" and everywhere):
        return dict.fromkeys(nodes, wish.nic)
    views: dict[str, NodeView | CliError] = await agents.each(AgentClient.view, nodes)
    if spec.target == "replica" and wish.replica is not None:
        return dict.fromkeys(nodes_of_replica(views, wish.replica, wish.rank))
    for view in views.values():
        if isinstance(view, CliError):
            raise view
    return {
        node: rail_device(view, wish.rail)
        for node, view in views.items()
        if wish.rail is not None and not isinstance(view, CliError)
    }


def _spec_of(published: FaultSpec) -> Spec:
    """As an agent publishes it."""
    params = tuple(
        Param(
            p.name,
            p.type,
            p.help,
            p.unit,
            None if p.required else p.default,
            p.minimum,
            p.maximum,
            tuple(p.choices),
        )
        for p in published.params
    )
    return Spec(published.kind, published.summary, published.target, params, published.irreversible)


def _typed(spec: Spec, raw: tuple[str, ...]) -> dict[str, ParamValue]:
    """NAME=VALUE texts, as the types that the kind wants. Limits are the agent's to hold. Raises UsageProblem."""
    from ftctl.errors import UsageProblem

    types = {param.name: param.type for param in spec.params}
    found: dict[str, ParamValue] = {}
    for text in raw:
        name, equals, value = text.partition("=")
        if not equals or name not in types:
            known = ", ".join(types) or "none"
            raise UsageProblem(f"--param {text}", f"NAME=VALUE is expected (parameters of {spec.kind}: {known})")
        try:
            found[name] = _value(types[name], value)
        except ValueError:
            raise UsageProblem(f"--param {text}", f"{value!r} is no {types[name]}") from None
    return found


def _value(kind: str, text: str) -> ParamValue:
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text)
    if kind == "bool":
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    return text


async def _undo(agents: Agents, outcome: Outcome) -> ExitCode:
    """After Ctrl-C: take everything back and say so."""
    from ftctl.app import report
    from ftctl.client.injection import take_back

    failures = await take_back(agents, outcome)
    for failure in failures:
        report(agents.world, failure)
    if failures:
        return ExitCode.IN_FORCE
    done = sum(fault.irreversible for fault in outcome.faults.values())
    count = len(outcome.faults) - done
    left = f"{done} happened and cannot be taken back" if done else "nothing is left"
    agents.world.say(f"interrupted: {count} reverted, {left}" if count or done else "interrupted: nothing was injected")
    return ExitCode.INTERRUPTED


def _list_kinds(flags: Flags) -> ExitCode:
    """The catalogue as the agents publish it; a kind that some agents cannot do says which."""
    from ftctl.client.agent import AgentClient
    from ftctl.client.cluster import Cluster
    from ftctl.errors import CliError
    from ftctl.exit_codes import most_urgent
    from ftctl.render import document, tables

    cluster = Cluster(current(), flags)

    async def ask(agents: Agents) -> dict[str, list[FaultSpec] | CliError]:
        return await agents.each(AgentClient.fault_kinds)

    answers = cluster.run(ask)
    errors = [answer for answer in answers.values() if isinstance(answer, CliError)]
    kinds: dict[str, FaultSpec] = {}
    cannot: dict[str, list[str]] = {}
    for node, answer in answers.items():
        for spec in answer if isinstance(answer, list) else []:
            kinds.setdefault(spec.kind, spec)
            if not spec.supported:
                cannot.setdefault(spec.kind, []).append(f"{node}: {spec.unsupported_reason or 'not supported'}")
    if cluster.output.for_machines:
        whole: document.Document = {
            "schema": document.SCHEMA,
            "kinds": [
                {**spec.model_dump(mode="json"), "unsupported_on": cannot.get(kind, [])} for kind, spec in kinds.items()
            ],
            "not_offered": NOT_OFFERED,
            "errors": [str(error) for error in errors],
        }
        document.emit(cluster.world, cluster.output, whole)
    elif kinds:
        rows = [
            (
                kind,
                spec.target,
                "no" if spec.irreversible else "yes",
                spec.summary + "".join(f"\n{reason}" for reason in cannot.get(kind, [])),
            )
            for kind, spec in kinds.items()
        ]
        rows += [(kind, "-", "-", f"not offered: {reason}") for kind, reason in NOT_OFFERED.items()]
        tables.show(cluster.world.console(), tables.table("", ("kind", "target", "undone", "what it does"), rows))
    for error in errors:
        cluster.world.say(f"error: {error}")
    return most_urgent(error.code for error in errors)
