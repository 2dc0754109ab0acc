"""`ftctl doctor`: what this machine can and cannot do, and how to change that."""

from __future__ import annotations

from ftctl.context import current
from ftctl.exit_codes import ExitCode
from ftctl.options import OutputOption, plain_app

app = plain_app()


@app.command()
def doctor(output: OutputOption = None) -> ExitCode | None:
    """Say what this machine can and cannot do.

    ok: works. warn: something optional is not possible here. missing: needed and broken (exit code 1).
    """
    from rich.text import Text

    from ftctl.commands import checks
    from ftctl.config import output_only
    from ftctl.render import document, tables

    world = current()
    form = output_only(world, output)
    console = world.console()
    done: list[checks.Check] = []
    width = 22
    for check in checks.run_all():
        done.append(check)
        if form.for_machines:
            continue
        colour = {"ok": tables.GOOD, "warn": tables.PASSING, "missing": tables.BAD}[check.status]
        line = Text(f"{check.status:<8}", style=colour)
        line.append(f"{check.name:<{width}} {check.text}", style="default")
        console.print(line, soft_wrap=True)
        if check.fix:
            console.print(Text(f"{'':<{8 + width}} fix: {check.fix}"), soft_wrap=True)
        world.stdout.flush()
    broken = [check.name for check in done if check.status == "missing"]
    if form.for_machines:
        whole: document.Document = {
            "schema": document.SCHEMA,
            "ok": not broken,
            "checks": [{"name": c.name, "status": c.status, "text": c.text, "fix": c.fix} for c in done],
        }
        document.emit(world, form, whole)
    if broken:
        world.say(f"needed and broken: {', '.join(broken)}")
        return ExitCode.FAILED
    return ExitCode.OK
