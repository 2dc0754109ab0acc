"""The options that every command talking to agents has, declared once and added to the commands by a decorator.

Typer reads a command's options from its signature, so `with_cluster` gives the command a signature with these options
in the place of its first parameter, `cluster`. The client and all it needs are imported only when such a command runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, get_type_hints

import typer

from ftctl import context
from ftctl.exit_codes import ExitCode

if TYPE_CHECKING:
    from ftctl.client.cluster import Cluster
    from ftctl.config import Flags

P = ParamSpec("P")


class OutputFormat(str, Enum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def for_machines(self) -> bool:
        return self in (OutputFormat.JSON, OutputFormat.YAML)


OutputOption = Annotated[
    OutputFormat | None,
    typer.Option("--output", "-o", help="How to print [env: FTCTL_OUTPUT; default: table].", show_default=False),
]
InventoryOption = Annotated[
    Path | None,
    typer.Option("--inventory", metavar="FILE", help="The agents and how to reach them [env: FTCTL_INVENTORY]."),
]
LabOption = Annotated[
    str | None,
    typer.Option("--lab", metavar="NAME", help="The cluster is this lab [env: FTCTL_LAB]."),
]
TokenOption = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="File with the token, mode 0600 [env: FTCTL_TOKEN_FILE]."),
]
_TIMEOUT_HELP = "How long an agent may take to answer [env: FTCTL_TIMEOUT; default: 3s]."
TimeoutOption = Annotated[
    str | None,
    typer.Option("--timeout", "--agent-timeout", metavar="TIME", help=_TIMEOUT_HELP),
]
AgentTimeoutOption = Annotated[
    str | None,
    typer.Option("--agent-timeout", metavar="TIME", help=_TIMEOUT_HELP),
]


def with_cluster(command: Callable[Concatenate[Cluster, P], ExitCode | None]) -> Callable[..., ExitCode | None]:
    """Turn `command(cluster, ...)` into a typer command with the shared options."""

    def connected(flags: Flags, *args: P.args, **kwargs: P.kwargs) -> ExitCode | None:
        from ftctl.client.cluster import Cluster

        return command(Cluster(context.current(), flags), *args, **kwargs)

    return _with_shared_options(connected, command)


def with_flags(command: Callable[Concatenate[Flags, P], ExitCode | None]) -> Callable[..., ExitCode | None]:
    """As with_cluster, for a command that may not need the cluster: it gets the flags and makes its own."""
    return _with_shared_options(command, command)


def _with_shared_options(
    command: Callable[..., ExitCode | None], described: Callable[..., ExitCode | None]
) -> Callable[..., ExitCode | None]:
    """Add the options; names, defaults and help come from `described`, whose first parameter they replace.

    A command with a `timeout` of its own (wait) leaves only `--agent-timeout` for that of the agents; one with an
    `own_lab` has a `--lab` of its own meaning, and one with an `own_output` a `-o` of its own.
    """

    def run(**given: Any) -> ExitCode | None:
        from ftctl.config import Flags

        flags = Flags(
            inventory=given.pop("inventory"),
            lab=given.pop("lab", None),
            token_file=given.pop("token_file"),
            timeout=given.pop("agent_timeout"),
            output=given.pop("output", None),
        )
        return command(flags, **given)

    own = list(inspect.signature(described).parameters.values())[1:]
    hints = get_type_hints(described, localns={"Cluster": object, "Flags": object}, include_extras=True)
    shared = {
        "output": OutputOption,
        "inventory": InventoryOption,
        "lab": LabOption,
        "token_file": TokenOption,
        "agent_timeout": AgentTimeoutOption if "timeout" in hints else TimeoutOption,
    }
    if "own_lab" in hints:  # chaos run, whose --lab brings one
        del shared["lab"]
    if "own_output" in hints:  # bundle, whose -o names a file
        del shared["output"]
    # Keyword-only throughout: typer calls by keyword, and options with defaults may then stand before required ones.
    keyword = [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own
    ] + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in shared.items()
    ]
    run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword}
    run.__doc__ = described.__doc__
    run.__name__ = described.__name__
    return run


def plain_app() -> typer.Typer:
    """A typer application for one command, plain like the top level."""
    return typer.Typer(rich_markup_mode=None, add_completion=False)


def plain_group(help_text: str) -> typer.Typer:
    """A typer application for a group of subcommands (`drain replica R`), also while it has only one."""
    group = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True, help=help_text)

    @group.callback()
    def group_itself() -> None:
        pass

    return group
