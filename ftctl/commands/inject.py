"""`ftctl inject FAULT`: one command for each kind of fault, with the options that this kind has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.context import current
from ftctl.exit_codes import ExitCode
from ftctl.options import with_cluster, with_flags

if TYPE_CHECKING:
    from agents.api.models import FaultView
    from ftctl.client.agent import AgentClient
    from ftctl.client.cluster import Agents, Cluster
    from ftctl.client.injection import Outcome
    from ftctl.config import Flags

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    help="Inject a fault that takes itself back.",
    invoke_without_command=True,
)

NodeOption = Annotated[str, typer.Option("--node", metavar="NODES", help="Where: node1, or several as node[0-3].")]
DurationOption = Annotated[
    str, typer.Option("--duration", metavar="TIME", help="When it takes itself back: 500ms, 20s, 2m. Agents cap it.")
]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; shown wherever the fault is shown.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Let the agents make all checks, and inject nothing.")]


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


@app.command()
@with_cluster
def noop(
    cluster: Cluster,
    *,
    node: NodeOption,
    duration: DurationOption = "60s",
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
) -> ExitCode | None:
    """Nothing at all, through the whole life of a fault: to try the tool and its limits."""

    async def no_device(_client: AgentClient) -> None:
        return None

    return _inject(cluster, "noop", node, duration, reason, dry_run=dry_run, device=no_device)


@app.command("link-down")
@with_cluster
def link_down(
    cluster: Cluster,
    *,
    node: NodeOption,
    nic: Annotated[str | None, typer.Option("--nic", metavar="NAME", help="The network device, a rail.")] = None,
    rail: Annotated[int | None, typer.Option("--rail", metavar="K", help="The K-th rail of the node, from 0.")] = None,
    duration: DurationOption = "60s",
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    allow_last_rail: Annotated[
        bool, typer.Option("--allow-last-rail", help="Also when no other healthy rail is left on the node.")
    ] = False,
) -> ExitCode | None:
    """Take a rail of a node down (ip link set NAME down); addresses and routes come back with it."""
    from ftctl.client.selection import rail_device
    from ftctl.errors import UsageProblem

    if (nic is None) == (rail is None):
        raise UsageProblem("inject link-down", "say which link: either --nic NAME or --rail K", "ftctl status")

    async def device(client: AgentClient) -> str | None:
        return nic if rail is None else rail_device(await client.view(), rail)

    return _inject(
        cluster, "link-down", node, duration, reason, dry_run=dry_run, allow_last_rail=allow_last_rail, device=device
    )


def _inject(
    cluster: Cluster,
    kind: str,
    node: str,
    duration: str,
    reason: str,
    *,
    dry_run: bool,
    device: Callable[[AgentClient], Awaitable[str | None]],
    allow_last_rail: bool = False,
) -> ExitCode:
    from agents.api.models import InjectRequest
    from ftctl import durations
    from ftctl.client import injection
    from ftctl.client.selection import nodes_named
    from ftctl.errors import CliError, UsageProblem

    try:
        duration_s = durations.parse(duration)
    except durations.DurationError as error:
        raise UsageProblem("--duration", str(error)) from None
    if duration_s <= 0:
        raise UsageProblem("--duration", f"{duration}: a fault must last longer than nothing", "for example 20s")
    nodes = nodes_named(cluster.inventory, node)

    async def work(agents: Agents) -> ExitCode:
        with injection.deferred("interrupted: taking back what was begun (at most 30 s) ...", agents) as interrupt:
            devices = await agents.each(device, nodes)
            for answer in devices.values():
                if isinstance(answer, CliError):
                    raise answer  # nothing was sent to any node
            if interrupt.set:
                return await _undo(agents, injection.Outcome())
            requests = {
                name: InjectRequest(
                    kind=kind,
                    nic=nic,
                    duration_s=duration_s,
                    reason=reason,
                    request_id=injection.new_request_id(),
                    dry_run=dry_run,
                    allow_last_rail=allow_last_rail,
                )
                for name, nic in devices.items()
                if not isinstance(nic, CliError)
            }
            outcome = await injection.inject(agents, requests)
            if not interrupt.set:
                _show(cluster, outcome, dry_run)
            if await interrupt.closed() and not dry_run:
                return await _undo(agents, outcome)
        return outcome.code()

    return cluster.run(work)


async def _undo(agents: Agents, outcome: Outcome) -> ExitCode:
    """After Ctrl-C: take everything back and say so."""
    from ftctl.app import report
    from ftctl.client.injection import take_back

    failures = await take_back(agents, outcome)
    for failure in failures:
        report(agents.world, failure)
    if failures:
        return ExitCode.IN_FORCE
    count = len(outcome.faults)
    agents.world.say(
        f"interrupted: {count} reverted, nothing is left" if count else "interrupted: nothing was injected"
    )
    return ExitCode.INTERRUPTED


def _show(cluster: Cluster, outcome: Outcome, dry_run: bool) -> None:
    from ftctl.app import report
    from ftctl.client.injection import in_doubt, still_there
    from ftctl.render import document, tables
    from ftctl.render.status import fault_table

    world = cluster.world
    faults = list(outcome.faults.values())
    doubts = [in_doubt(node, request) for node, request in outcome.unknown.items()]
    doubts += [still_there(fault) for fault in outcome.troubled()]
    errors = [error for node, error in outcome.errors.items() if node not in outcome.unknown] + doubts
    if cluster.output.for_machines:
        whole: document.Document = {
            "schema": document.SCHEMA,
            "dry_run": dry_run,
            "faults": [document.fault(f) for f in faults],
            "errors": [str(error) for error in errors],
        }
        document.emit(world, cluster.output, whole)
    elif faults and not dry_run:
        tables.show(world.console(), fault_table(faults))
    if dry_run:
        for fault in faults:
            world.say(_would(fault))
    elif faults:
        world.say(f"take it back earlier with: ftctl revert {' '.join(fault.id for fault in faults)}")
    for error in errors:
        report(world, error)


def _would(fault: FaultView) -> str:
    from ftctl.durations import show

    undo = f"; undo: {'; '.join(fault.undo)}" if fault.undo else ""
    return f"dry run: {fault.kind} on {fault.target} would be injected for {show(fault.duration_s)}{undo}"


def _list_kinds(flags: Flags) -> ExitCode:
    """The catalogue as the agents publish it; a kind that some agents cannot do says which."""
    from agents.api.models import FaultSpec
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
        tables.show(cluster.world.console(), tables.table("", ("kind", "target", "undone", "what it does"), rows))
    for error in errors:
        cluster.world.say(f"error: {error}")
    return most_urgent(error.code for error in errors)
