"""`ftctl policy`: what the agents decide about verdicts, by which rules, and whether they do it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftctl.exit_codes import ExitCode
from ftctl.options import plain_group, with_cluster

if TYPE_CHECKING:
    from agents.api.policy import ModeAnswer, PolicyAnswer
    from ftctl.client.cluster import Agents, Cluster
    from ftctl.errors import CliError

app = plain_group("Show, check and switch what agents do about verdicts.")
Nodes = Annotated[str | None, typer.Option("--node", metavar="NODES", help="Only these nodes (node[0-3]).")]


@app.command()
@with_cluster
def show(cluster: Cluster, *, node: Nodes = None) -> ExitCode | None:
    """Show the mode of every agent, the rules, who is out because of them, and the last decisions.

    Exit code 6: an agent did not answer.
    """
    from agents.api.policy import PolicyAnswer
    from ftctl.client.agent import AgentClient
    from ftctl.client.selection import nodes_named
    from ftctl.errors import CliError
    from ftctl.exit_codes import most_urgent
    from ftctl.render import document

    async def ask(agents: Agents) -> dict[str, PolicyAnswer | CliError]:
        return await agents.each(AgentClient.policy, nodes_named(cluster.inventory, node))

    answers = cluster.run(ask)
    found = {name: answer for name, answer in answers.items() if isinstance(answer, PolicyAnswer)}
    errors = [answer for answer in answers.values() if isinstance(answer, CliError)]
    if cluster.output.for_machines:
        whole: document.Document = {
            "schema": document.SCHEMA,
            "nodes": [answer.model_dump(mode="json") for answer in found.values()],
            "errors": [str(error) for error in errors],
        }
        document.emit(cluster.world, cluster.output, whole)
    else:
        _tables(cluster, found)
    for error in errors:
        cluster.world.say(f"error: {error}")
    return most_urgent(error.code for error in errors)


@app.command()
def validate(
    file: Annotated[Path, typer.Argument(help="A policy file; `policy: {file: ...}` in an agent's configuration.")],
) -> None:
    """Check a policy file: unknown keys, wrong values, and rules that an earlier one hides or contradicts.

    Exit code 2: it cannot be used.
    """
    from agents.api.policyfile import DEFAULT, PolicyProblem, read
    from ftctl.context import current
    from ftctl.errors import UsageProblem

    try:
        policy = read(file)
    except PolicyProblem as error:
        reason = str(error).removeprefix(f"{file}:").strip()
        raise UsageProblem(f"policy {file}", reason, f"compare it with the rules that ship: {DEFAULT}") from None
    hooks = sum(bool(rule.hook) for rule in policy.rules)
    more = f", {hooks} with a hook" if hooks else ""
    current().say(f"{file}: {len(policy.rules)} rules{more}; it can be used")


@app.command("set-mode")
@with_cluster
def set_mode(
    cluster: Cluster,
    mode: Annotated[str, typer.Argument(metavar="MODE", help="observe, recommend or act.")],
    *,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why (required).")],
    node: Nodes = None,
) -> ExitCode | None:
    """Only tell decisions (observe), show them as problems too (recommend), or carry them out (act).

    Agents keep it over restarts. What is wrong at that moment is decided anew, and acts of before no longer count for
    the breakers. Exit code 6: an agent did not answer, and is as before.
    """
    from agents.api.policy import ModeAnswer, ModeRequest
    from agents.api.policyfile import MODES
    from ftctl.client.selection import nodes_named
    from ftctl.errors import CliError, UsageProblem
    from ftctl.exit_codes import most_urgent
    from ftctl.render import document

    if mode not in MODES:
        raise UsageProblem(f"mode {mode}", f"not one of {', '.join(MODES)}", "ftctl policy set-mode --help")
    if not reason.strip():
        raise UsageProblem("--reason", "policy set-mode needs a reason, and it is empty")
    wish = ModeRequest.model_validate({"mode": mode, "reason": reason[:500]})

    async def ask(agents: Agents) -> dict[str, ModeAnswer | CliError]:
        chosen = nodes_named(cluster.inventory, node)
        return await agents.each(lambda client: client.policy_mode(wish), chosen)

    answers = cluster.run(ask)
    failed = {name: answer for name, answer in answers.items() if isinstance(answer, CliError)}
    new = sum(isinstance(answer, ModeAnswer) and answer.changed for answer in answers.values())
    if cluster.output.for_machines:
        rows: list[dict[str, document.Json]] = []
        for name, answer in answers.items():
            why = str(answer) if isinstance(answer, CliError) else ""
            rows.append({"name": name, "changed": isinstance(answer, ModeAnswer) and answer.changed, "error": why})
        document.emit(cluster.world, cluster.output, {"schema": document.SCHEMA, "mode": mode, "nodes": rows})
    else:
        done = len(answers) - len(failed)
        old = f" ({done - new} of them before already)" if done > new else ""
        cluster.world.say(f"the policy's mode is {mode} on {done} of {len(answers)} nodes{old}")
    for name, error in failed.items():
        cluster.world.say(f"error: not changed on {name}, as far as is known: {error}")
    return most_urgent(error.code for error in failed.values())


def _tables(cluster: Cluster, found: dict[str, PolicyAnswer]) -> None:
    from ftctl.durations import show as ago
    from ftctl.render import tables

    now = cluster.world.unix_time()
    modes, held, told = [], [], []
    for name, answer in found.items():
        since = f", {ago(max(0.0, now - answer.mode_since))} ago" if answer.mode_since else ""
        modes.append((name, answer.mode, f"{answer.mode_by}{since}", answer.source, answer.trouble))
        held += [(name, h.replica, h.object, h.action, h.incident, ago(max(0.0, now - h.since))) for h in answer.held]
        told += [(d.time, name, d.object, d.action, d.incident, d.reason) for d in answer.decisions]
    shown = [tables.table("", ("node", "mode", "set by", "rules", "trouble"), modes)]
    by_rules: dict[str, tuple[list[str], PolicyAnswer]] = {}
    for name, answer in found.items():
        by_rules.setdefault(str((answer.rules, answer.limits)), ([], answer))[0].append(name)
    for names, answer in by_rules.values():
        title = f"rules of {', '.join(names)}: the first that fits decides" if len(by_rules) > 1 else "rules"
        columns = ("rule", "kind", "codes", "health", "suggested", "times", "action")
        shown.append(tables.table(title, columns, [_rule(rule) for rule in answer.rules]))
        limits = ", ".join(f"{key} {value:g}" for key, value in answer.limits.items())
        shown.append(tables.table("", ("limits",), [(limits,)]))
    if held:
        shown.append(tables.table("out", ("node", "replica", "because of", "action", "incident", "for"), held))
    if told:
        rows = [(ago(max(0.0, now - at)), *rest) for at, *rest in sorted(told)[-20:]]
        shown.append(tables.table("lately", ("ago", "node", "object", "action", "incident", "why"), rows))
    tables.show(cluster.world.console(), *shown)


def _rule(rule: dict[str, Any]) -> tuple[str, ...]:
    times = f"{rule['at_least']} in {rule['within_s']:g} s" if rule["at_least"] > 1 else "1"
    did = rule["action"] + (" and cordon" if rule["cordon"] else "") + (f", {rule['hook'][0]}" if rule["hook"] else "")
    words = (", ".join(rule[key]) or "any" for key in ("codes", "health", "suggests"))
    return (rule["name"], rule["kind"] or "any", *words, times, did)
