"""`ftctl faults`: what is injected, by whom, and for how long still; no more of them, and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.exit_codes import ExitCode
from ftctl.options import plain_app, with_cluster, with_flags

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ftctl.client.cluster import Agents, Cluster
    from ftctl.config import Flags
    from ftctl.errors import CliError

app = plain_app()
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why (required); shown in the status.")]
HaltNodes = Annotated[str | None, typer.Option("--node", metavar="NODES", help="Only these nodes (node[0-3]).")]


@app.callback(invoke_without_command=True)
@with_flags
def faults(
    flags: Flags,
    ctx: typer.Context,
    every: Annotated[bool, typer.Option("--all", help="Also those reverted in the last hour.")] = False,
    node: Annotated[str | None, typer.Option("--node", metavar="NODES", help="Only these nodes (node[0-3]).")] = None,
) -> ExitCode | None:
    """List faults: their state, time left and owner.

    Exit code 5 when a fault is stuck, 6 when an agent did not answer (its faults are then not in the list).
    """
    from ftctl import context
    from ftctl.client.cluster import Cluster
    from ftctl.config import Flags
    from ftctl.errors import UsageProblem

    verb = ctx.invoked_subcommand
    if verb is None:
        return _list(Cluster(context.current(), flags), every, node)
    if every or node or flags != Flags():
        raise UsageProblem(f"faults {verb}", f"options stand behind {verb}", f"ftctl faults {verb} --help")
    return None


@app.command()
@with_cluster
def halt(cluster: Cluster, *, reason: Reason, node: HaltNodes = None) -> ExitCode | None:
    """Take all faults back, and inject none until `ftctl faults allow`.

    Agents keep it over restarts; a second halt does no harm. Exit code 5: a fault may still be in force; 6: an agent
    did not answer (its faults revert when their time is over, and it still injects).
    """
    return _everywhere(cluster, "halt", reason, node)


@app.command()
@with_cluster
def allow(cluster: Cluster, *, reason: Reason, node: HaltNodes = None) -> ExitCode | None:
    """Let faults be injected again. Exit code 6: an agent did not answer, and is as before."""
    return _everywhere(cluster, "allow", reason, node)


def _everywhere(cluster: Cluster, verb: str, reason: str, node: str | None) -> ExitCode:
    from agents.api.halt import HaltAnswer, HaltRequest
    from ftctl.client.injection import is_over, still_there
    from ftctl.client.selection import nodes_named
    from ftctl.errors import CliError, UsageProblem
    from ftctl.exit_codes import most_urgent
    from ftctl.hostlist import fold
    from ftctl.render import document, tables
    from ftctl.render.status import fault_table

    if not reason.strip():
        raise UsageProblem("--reason", f"faults {verb} needs a reason, and it is empty")
    chosen = nodes_named(cluster.inventory, node)
    wish = HaltRequest(reason=reason)

    async def ask(agents: Agents) -> dict[str, HaltAnswer | CliError]:
        return await agents.each(lambda client: client.halt(verb, wish), chosen, within_s=agents.timeout_s)

    answers = cluster.run(ask)
    done = {name: answer for name, answer in answers.items() if isinstance(answer, HaltAnswer)}
    failed = {name: answer for name, answer in answers.items() if isinstance(answer, CliError)}
    after = [fault for answer in done.values() for fault in answer.faults]
    stuck = [still_there(fault) for fault in after if not is_over(fault)]
    if cluster.output.for_machines:
        rows = [
            {
                "name": name,
                "changed": isinstance(answer, HaltAnswer) and answer.changed,
                "halt": answer.halt.model_dump(mode="json") if isinstance(answer, HaltAnswer) and answer.halt else None,
                "error": str(answer) if isinstance(answer, CliError) else "",
            }
            for name, answer in answers.items()
        ]
        whole: document.Document = {
            "schema": document.SCHEMA,
            "action": verb,
            "nodes": rows,
            "faults": [document.fault(fault) for fault in after],
        }
        document.emit(cluster.world, cluster.output, whole)
    else:
        if after:
            tables.show(cluster.world.console(), fault_table(after))
        new = sum(answer.changed for answer in done.values())
        old = len(done) - new
        rest = f" ({old} of them before already)" if old else ""
        cluster.world.say(f"faults are {verb}ed on {len(done)} of {len(answers)} nodes{rest}")
        if verb == "halt" and done:
            cluster.world.say("allow them again with: ftctl faults allow --reason TEXT")
    for line in _not_reached(failed):
        cluster.world.say(f"error: not {verb}ed on {line}")
    if failed:
        cluster.world.say(f"next:  ftctl faults {verb} --node {fold(failed)} --reason TEXT   # no harm if repeated")
    for problem in stuck:
        cluster.world.say(f"error: {problem}")
        if problem.hint:
            cluster.world.say(f"next:  {problem.hint}")
    return most_urgent(error.code for error in [*stuck, *failed.values()])


def _not_reached(failed: Mapping[str, CliError]) -> Iterator[str]:
    """All of them by name, those with one reason in one line."""
    from ftctl.hostlist import fold

    reasons: dict[str, list[str]] = {}
    for name, error in failed.items():
        reasons.setdefault(error.reason, []).append(name)
    for reason, names in reasons.items():
        count = f" ({len(names)} nodes)" if len(names) > 1 else ""
        yield f"{fold(names)}{count}, as far as is known: {reason if count else failed[names[0]]}"


def _list(cluster: Cluster, every: bool, node: str | None) -> ExitCode:
    from agents.api.models import FaultState
    from ftctl.client.agent import AgentClient
    from ftctl.client.selection import nodes_named
    from ftctl.errors import CliError
    from ftctl.exit_codes import most_urgent
    from ftctl.render import document, tables
    from ftctl.render.status import fault_table

    async def ask(agents: Agents) -> dict[str, object]:
        return dict(await agents.each(AgentClient.faults, nodes_named(cluster.inventory, node)))

    answers = cluster.run(ask)
    errors = [answer for answer in answers.values() if isinstance(answer, CliError)]
    found = [fault for answer in answers.values() if isinstance(answer, list) for fault in answer]
    shown = sorted((f for f in found if every or not f.state.over), key=lambda f: f.created)
    if cluster.output.for_machines:
        document.emit(
            cluster.world,
            cluster.output,
            {
                "schema": document.SCHEMA,
                "faults": [document.fault(f) for f in shown],
                "errors": [str(error) for error in errors],
            },
        )
    elif shown:
        tables.show(cluster.world.console(), fault_table(shown))
    elif not errors:
        cluster.world.say("no faults")
    for error in errors:
        cluster.world.say(f"error: {error}")
    stuck = [ExitCode.IN_FORCE for f in shown if f.state is FaultState.STUCK]
    return most_urgent([*stuck, *(error.code for error in errors)])
