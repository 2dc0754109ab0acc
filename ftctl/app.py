"""The `ftctl` command: which commands there are, and the one place that turns errors into exit codes.

A command's module is imported only when the command is used: `ftctl --help` must answer within 0.25 s, and pydantic
and rich together cost more than that. The one-line helps are therefore written here as well as in the
command's own docstring; a test keeps the two equal.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import typer
import typer.core
import typer.main

from ftctl import context
from ftctl.errors import CliError, UsageProblem
from ftctl.exit_codes import ExitCode


class Lazy(NamedTuple):
    """A command that is imported when it is used: `module` has a typer application named `app`."""

    module: str
    help: str


COMMANDS: dict[str, Lazy] = {
    "status": Lazy("ftctl.commands.status", "Show nodes, rails, replicas, stalls, faults, and what to do next."),
    "health": Lazy(
        "ftctl.commands.health", "Show what is wrong with GPUs, NICs and other parts, and with what evidence."
    ),
    "watch": Lazy(
        "ftctl.commands.watch", "Watch replicas, rails, faults, throughput and events on one screen; q ends."
    ),
    "why": Lazy("ftctl.commands.why", "Explain why something is in its state."),
    "ranks": Lazy("ftctl.commands.ranks", "Show the processes of the replicas, their links and their logs."),
    "dump": Lazy("ftctl.commands.dump", "Show what processes are doing: the stacks of all their threads."),
    "links": Lazy(
        "ftctl.commands.links",
        "Show the links of all processes, rail by rail: training ranks, and those that only run NCCL.",
    ),
    "bundle": Lazy(
        "ftctl.commands.bundle",
        "Write one archive for an incident report: status, events, faults, links, metrics, health and audit, versions.",
    ),
    "events": Lazy("ftctl.commands.events", "Show what happened, from all agents and the coordinator."),
    "inject": Lazy("ftctl.commands.inject", "Inject a fault that takes itself back."),
    "audit": Lazy("ftctl.commands.audit", "Show who asked for which change, from where, why, and what came of it."),
    "faults": Lazy("ftctl.commands.faults", "List faults: their state, time left and owner."),
    "revert": Lazy("ftctl.commands.revert", "Take faults back now."),
    "policy": Lazy("ftctl.commands.policy", "Show, check and switch what agents do about verdicts."),
    "clear": Lazy("ftctl.commands.clear", "Forget what was wrong with a part, because somebody has seen to it."),
    "drain": Lazy("ftctl.commands.drain", "Let something leave the job at a step boundary, with nothing lost."),
    "cordon": Lazy("ftctl.commands.cordon", "Set a node apart: no replica is started on it."),
    "uncordon": Lazy("ftctl.commands.uncordon", "Let a node that was set apart be used again."),
    "evict": Lazy("ftctl.commands.evict", "Remove something from the job at once."),
    "rejoin": Lazy("ftctl.commands.rejoin", "Bring something back into the job."),
    "wait": Lazy("ftctl.commands.wait", "Wait until something has reached a state."),
    "coordinator": Lazy("ftctl.commands.coordinator", "Look at the coordinator, or settle a job that lost its record."),
    "chaos": Lazy(
        "ftctl.commands.chaos", "Run chaos experiments from playbooks, and judge recovery by their objectives."
    ),
    "lab": Lazy("ftctl.commands.lab", "A whole cluster on this machine, from network namespaces."),
    "env": Lazy("ftctl.commands.env", "Print the environment that a training framework needs."),
    "doctor": Lazy("ftctl.commands.doctor", "Say what this machine can and cannot do."),
    "version": Lazy("ftctl.commands.version", "Print the version."),
}


class LazyGroup(typer.core.TyperGroup):
    """A group that lists its commands without importing them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        lazy = COMMANDS.get(cmd_name)
        if lazy is None:
            return None
        command = typer.main.get_command(importlib.import_module(lazy.module).app)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"ftctl {near[0]} --help" if near else "ftctl --help"
            raise UsageProblem(args[0], "no such command", hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in COMMANDS.items()])


EPILOG = (
    "Exit codes: 0 ok; 1 failed or unhealthy; 2 usage or configuration; 3 no steady state; 4 stop condition; "
    "5 a fault may still be in force; 6 some agent unreachable; 7 refused by a guard; 130 interrupted."
)
app = typer.Typer(
    cls=LazyGroup,
    name="ftctl",
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)


@app.callback()
def ftctl() -> None:
    """Break distributed training on purpose, see what happened, and put it right."""


def report(world: context.World, error: CliError) -> None:
    """The error as the user sees it: the thing and the reason in one line, the next command in another."""
    world.say(f"error: {error}")
    if error.hint:
        world.say(f"next:  {error.hint}")


def main(args: Sequence[str] | None = None, world: context.World | None = None) -> int:
    """Run one command line (sys.argv by default) and return its exit code. Nothing escapes but SystemExit."""
    with context.active(world or context.World()) as here:
        try:
            result = typer.main.get_command(app).main(args=args, prog_name="ftctl", standalone_mode=False)
            here.stdout.flush()
            if type(result) is int and result == ExitCode.INTERRUPTED:  # how newer typers report Ctrl-C
                here.say("interrupted")
            return int(result) if isinstance(result, int) else ExitCode.OK
        except CliError as error:
            report(here, error)
            return error.code
        except (KeyboardInterrupt, typer.Abort):
            here.say("interrupted")
            return ExitCode.INTERRUPTED
        except BrokenPipeError:
            # The reader of a pipe has left (`ftctl events | head`). Python would complain again, flushing at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return ExitCode.FAILED
        except Exception as error:
            if hasattr(error, "format_message") and hasattr(error, "exit_code"):
                return _usage(here, error)
            if here.environ.get("FTCTL_DEBUG"):
                raise
            report(
                here,
                CliError(
                    "ftctl", f"internal error: {type(error).__name__}: {error}", "FTCTL_DEBUG=1 shows where it happened"
                ),
            )
            return ExitCode.FAILED


def _usage(world: context.World, error: Any) -> ExitCode:
    """A complaint of the command line parser (click's, or the one typer carries, depending on typer's version)."""
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else "ftctl"
    if type(error).__name__ == "NoArgsIsHelpError":
        world.say(ctx.get_help() if ctx is not None else error.format_message())
    else:
        message = str(error.format_message()).strip().rstrip(".").replace(": Value error, ", ": ")  # typer's words
        report(world, UsageProblem(path, message[:1].lower() + message[1:], f"{path} --help"))
    return ExitCode.USAGE
