"""`ftctl env nccl`: the environment that makes NCCL use links that survive the loss of a rail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from ftctl.context import current
from ftctl.exit_codes import ExitCode
from ftctl.options import OutputOption, plain_group

if TYPE_CHECKING:
    from ftar_core.ncclenv import Trial

app = plain_group("Print the environment that a training framework needs.")


@app.command()
def nccl(
    *,
    rails: Annotated[
        str | None,
        typer.Option(metavar="RAIL,...", help="The NICs that carry data [default: all but loopback and management]."),
    ] = None,
    backup: Annotated[
        str | None,
        typer.Option(metavar="RAIL=BACKUP,...", help="Who takes over from whom, or none [default: the nearest NIC]."),
    ] = None,
    give_up_after: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How long all rails may be dead before NCCL gets an error [default: 30]."),
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The job's token [default: a secret in each connection's handle]."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="backup|stripe", help="One rail carries the data and the others stand by, or all [default: backup]."
        ),
    ] = None,
    allow_sockets: Annotated[
        bool, typer.Option("--allow-sockets", help="Use sockets although an RDMA port is active.")
    ] = False,
    output: OutputOption = None,
) -> ExitCode | None:
    """Print export lines for NCCL's plugin: eval "$(ftctl env nccl)" before the training starts.

    Refused where NCCL would use another network in silence, and where an RDMA port is active without --allow-sockets.
    """
    import shlex

    from ftar_core import ncclenv
    from ftar_core.errors import FtarError
    from ftctl.config import output_only
    from ftctl.errors import CliError, UsageProblem
    from ftctl.render import document

    world = current()
    form = output_only(world, output)
    try:
        plugin = ncclenv.plugin_path()
    except FtarError as error:
        raise CliError("the NCCL plugin", str(error), error.hint) from None
    try:
        variables = ncclenv.environment(
            plugin=plugin,
            current=world.environ,
            rails=rails,
            backup=backup,
            timeout_s=give_up_after,
            token_file=str(world.cwd / token_file) if token_file else token_file,
            mode=mode,
            allow_sockets=allow_sockets,
            infiniband=ncclenv.INFINIBAND,
        )
    except FtarError as error:
        raise UsageProblem("", str(error), error.hint) from None
    if form.for_machines:
        document.emit(world, form, {"schema": document.SCHEMA, "env": dict(variables)})
    else:
        for name, value in variables.items():
            world.out(f"export {name}={shlex.quote(value)}")
    if "FTAR_TOKEN_FILE" not in {**world.environ, **variables}:
        world.say(f"note: {ncclenv.BOOTSTRAP_NOTE}")
    for line in _on_this_machine(ncclenv.trial(variables, world.environ), variables):
        world.say(line)
    return ExitCode.OK


def _on_this_machine(found: Trial, variables: Mapping[str, str]) -> Iterator[str]:
    """The nodes may have other NICs than the machine that prints their environment: told, not refused."""
    if found.refused:
        yield f"warning: the plugin refuses this on this machine, and NCCL would end with an error: {found.refused}"
    elif len(found.devices) == 1:
        yield f"warning: on this machine {found.devices[0]} is the only rail: the job ends when it fails"
        yield "next:  name two or more: ftctl env nccl --rails NIC,NIC"
    elif variables.get("FTAR_NET_BACKUP") == "none":
        yield f"warning: the rails {', '.join(found.devices)} have no backup: the job ends when one fails"
        yield "next:  ftctl env nccl without --backup none"
    else:
        yield f"note: on this machine the rails are {', '.join(found.devices)}"
