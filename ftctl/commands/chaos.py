"""`ftctl chaos`: playbooks. Validate them, see what they would do, run them, report and compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from ftctl.context import current
from ftctl.exit_codes import ExitCode
from ftctl.options import OutputOption, plain_group, with_cluster, with_flags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftctl.client.cluster import Agents, Cluster
    from ftctl.config import Flags
    from ftctl.playbook.planning import Line
    from ftctl.playbook.reading import Loaded

app = plain_group("Run chaos experiments from playbooks, and judge recovery by their objectives.")

Paths = Annotated[list[Path], typer.Argument(metavar="PLAYBOOK...", help="Files, or directories with *.yaml in them.")]
Vars = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--var", metavar="NAME=VALUE", help="Another value for a variable of the playbook. May be repeated."),
]
Tags = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--tag", metavar="TAG", help="Only playbooks with this tag. May be repeated: any of them."),
]
Junit = Annotated[Optional[Path], typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")]  # noqa: UP045
Html = Annotated[Optional[Path], typer.Option("--html", metavar="FILE", help="Write a report to look at.")]  # noqa: UP045
Markdown = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--markdown", metavar="FILE", help="Write a summary for a CI job's page."),
]
Seed = Annotated[int, typer.Option("--seed", help="Of all that is chosen at random; the same seed chooses the same.")]


def _books(paths: Sequence[Path], variables: Sequence[str] | None, tags: Sequence[str] | None) -> list[Loaded]:
    """Raises UsageProblem for the first playbook that is wrong."""
    from ftctl.errors import UsageProblem
    from ftctl.playbook import reading

    given = reading.variables_of(variables or [])
    world = current()
    books = [reading.load(path, given) for path in reading.find([world.cwd / path.expanduser() for path in paths])]
    names: dict[str, Loaded] = {}
    for book in books:
        if other := names.get(book.name):
            raise UsageProblem(str(book.path), f"has the name of {other.path}: {book.name}")
        names[book.name] = book
    chosen = [book for book in books if not tags or set(tags) & set(book.playbook.tags)]
    if not chosen:
        have = ", ".join(sorted({tag for book in books for tag in book.playbook.tags})) or "none"
        raise UsageProblem(
            f"--tag {' '.join(tags or [])}", f"no playbook has it (there are: {have})", "ftctl chaos list"
        )
    return chosen


@app.command()
def validate(paths: Paths, variables: Vars = None) -> ExitCode:
    """Check playbooks without a cluster: every mistake of a file with its line. Exit code 2 if there is one."""
    from ftctl.app import report
    from ftctl.errors import UsageProblem
    from ftctl.playbook import reading

    world = current()
    given = reading.variables_of(variables or [])
    wrong = 0
    for path in reading.find([world.cwd / path.expanduser() for path in paths]):
        try:
            book = reading.load(path, given)
        except UsageProblem as error:
            report(world, error)
            wrong += 1
        else:
            world.out(f"{path}: {book.name} is valid")
            for note in book.notes:
                world.say(f"note: {note}")
    return ExitCode.USAGE if wrong else ExitCode.OK


@app.command(name="list")
def list_(
    paths: Annotated[Optional[list[Path]], typer.Argument(metavar="[PLAYBOOK]...", show_default=False)] = None,  # noqa: UP045
    tags: Tags = None,
    runs: Annotated[bool, typer.Option("--runs", help="List what was run, newest first, instead.")] = False,
    output: OutputOption = None,
) -> ExitCode:
    """List playbooks (in ./playbooks if none are named): name, tags, what they do."""
    from ftctl.config import output_only
    from ftctl.render import document, tables

    world = current()
    chosen = output_only(world, output)
    if runs:
        from ftctl.report.reading import past_runs

        past = past_runs()
        if chosen.for_machines:
            document.emit(world, chosen, {"schema": document.SCHEMA, "runs": past})
        else:
            rows = [(r["name"], r["when"], r["verdict"], r["directory"]) for r in past]
            tables.show(world.console(), tables.table("", ("playbook", "when", "verdict", "directory"), rows))
        return ExitCode.OK
    books = _books(paths or [Path("playbooks")], None, tags)
    if chosen.for_machines:
        listed: list[document.Document] = [
            {"name": b.name, "file": str(b.path), "tags": b.playbook.tags, "description": b.playbook.description}
            for b in books
        ]
        document.emit(world, chosen, {"schema": document.SCHEMA, "playbooks": listed})
    else:
        told = [(b.name, " ".join(b.playbook.tags), _first_line(b.playbook.description)) for b in books]
        tables.show(world.console(), tables.table("", ("playbook", "tags", "what it shows"), told))
    return ExitCode.OK


def _first_line(text: str) -> str:
    return " ".join(text.split())[:160]


@app.command()
def schema() -> None:
    """Print the JSON Schema of playbooks, for editors that complete and check while you type."""
    import json

    from ftctl.playbook.schema import Playbook

    document = Playbook.model_json_schema(by_alias=True)
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    current().out(json.dumps(document, indent=2))


@app.command()
def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The playbook to write.")],
) -> None:
    """Write a small playbook to begin with."""
    from ftctl.errors import CliError, UsageProblem
    from ftctl.playbook.template import text_for

    world = current()
    target = world.cwd / path.expanduser()
    text = text_for(target.stem)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageProblem(str(path), "is there already", "give another name") from None
    except OSError as error:
        raise CliError(str(path), error.strerror or str(error)) from None
    world.out(f"{path} is written; next: ftctl chaos validate {path}   then   ftctl chaos run {path} --lab")


@app.command()
@with_cluster
def plan(cluster: Cluster, *, paths: Paths, variables: Vars = None, tags: Tags = None, seed: Seed = 0) -> ExitCode:
    """Make all reads and checks that a run would make, and print exactly what would be done where. Changes nothing."""
    from ftctl.playbook import planning
    from ftctl.render import document, tables

    books = _books(paths, variables, tags)
    found: dict[str, list[Line]] = {}

    async def work(agents: Agents) -> None:
        for book in books:
            environment = cluster.inventory.environment
            found[book.name] = await planning.plan(
                book.playbook, agents, seed=seed, environment=environment, file=str(book.path)
            )

    cluster.run(work)
    if cluster.output.for_machines:
        plans: list[document.Document] = [
            {"name": name, "lines": [planning.document(line) for line in lines]} for name, lines in found.items()
        ]
        document.emit(cluster.world, cluster.output, {"schema": document.SCHEMA, "plans": plans})
    else:
        parts = [
            tables.table(name, ("phase", "what", "where", "says"), [(x.phase, x.what, x.where, x.says) for x in lines])
            for name, lines in found.items()
        ]
        tables.show(cluster.world.console(), *parts)
    return planning.worst([line for lines in found.values() for line in lines])


@app.command()
@with_flags
def run(
    flags: Flags,
    *,
    paths: Paths,
    own_lab: Annotated[
        bool, typer.Option("--lab", help="Make a lab for it, as the playbook asks, and remove it afterwards.")
    ] = False,
    variables: Vars = None,
    tags: Tags = None,
    seed: Seed = 0,
    repeat: Annotated[
        int, typer.Option("--repeat", min=0, help="Instead of the playbook's own number; 0: its own.")
    ] = 0,
    junit: Junit = None,
    html: Html = None,
    markdown: Markdown = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", metavar="DIR", help="Where journals go [default: the user's state directory]."),
    ] = None,
) -> ExitCode:
    """Run playbooks one after the other: steady state, method, steady state, clean-up; then judge the objectives.

    Clean-up is always made, also after Ctrl-C; if this process is killed, the agents take its faults back themselves.
    """
    from ftctl.app import report as complain
    from ftctl.client.cluster import Cluster
    from ftctl.config import output_only
    from ftctl.errors import CliError
    from ftctl.exit_codes import most_urgent
    from ftctl.lab.progress import progress
    from ftctl.playbook import conduct
    from ftctl.playbook.verdict import Finished
    from ftctl.render import runs
    from ftctl.report.files import Files

    world = current()
    books = [_repeated(book, repeat) for book in _books(paths, variables, tags)]
    files = Files(junit, html, markdown)
    files.check(world)
    place = world.cwd / out.expanduser() if out is not None else None
    finished: list[Finished] = []  # what ends the others, a lab that does not go, must not lose these
    trouble: list[CliError] = []
    with progress(world, "reading playbooks") as talk:
        try:
            if own_lab:
                conduct.in_labs(world, books, place, seed, talk, finished=finished)
            else:
                conduct.on_cluster(Cluster(world, flags), books, place, seed, talk, finished=finished)
        except CliError as error:
            if not finished:
                raise
            trouble.append(error)
        except KeyboardInterrupt:
            if not finished:
                raise
            left = ", ".join(book.name for book in books if book.name not in {run.name for run in finished})
            trouble.append(CliError("interrupted", f"not run: {left}", code=ExitCode.INTERRUPTED))
    runs.show(world, output_only(world, flags.output), finished)
    trouble += files.write(world, [run.directory for run in finished])
    for problem in trouble:
        complain(world, problem)
    return most_urgent([conduct.overall(finished), *(problem.code for problem in trouble)])


def _repeated(book: Loaded, repeat: int) -> Loaded:
    """Raises UsageProblem when the objectives do not allow so few."""
    from dataclasses import replace

    from pydantic import ValidationError

    from ftctl.errors import UsageProblem
    from ftctl.playbook.schema import Playbook

    if repeat == 0:
        return book
    try:
        whole = Playbook.model_validate({**dict(book.playbook), "repeat": repeat})
    except ValidationError as error:
        raise UsageProblem(f"--repeat {repeat}", error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    return replace(book, playbook=whole)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs, as `chaos list --runs` shows.")
    ],
    junit: Junit = None,
    html: Html = None,
    markdown: Markdown = None,
) -> ExitCode:
    """Make reports of runs from their journals, also of one whose controller died. Without an option: Markdown."""
    from ftctl.report import markdown as as_markdown
    from ftctl.report.files import Files
    from ftctl.report.reading import read_run

    files = Files(junit, html, markdown)
    files.check(current())
    directories = [current().cwd / path.expanduser() for path in runs]
    found = [read_run(directory) for directory in directories]
    if files == Files():
        current().out(as_markdown.render(found))
    for error in files.write(current(), directories):
        raise error
    return ExitCode.OK if all(run.passed for run in found) else ExitCode.FAILED


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="Directory of an earlier run, or of several.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="Directory of a later run, or of several.")],
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", min=0.0, help="A value may grow by this share before it is a regression."),
    ] = 0.25,
    output: OutputOption = None,
) -> ExitCode:
    """Compare the recovery times of two runs of the same playbooks. Exit code 1 when one has become worse."""
    from ftctl.config import output_only
    from ftctl.render import document, tables
    from ftctl.report.comparing import compare_runs
    from ftctl.report.reading import read_all

    world = current()
    chosen = output_only(world, output)
    rows = compare_runs(
        read_all(world.cwd / before.expanduser()), read_all(world.cwd / after.expanduser()), tolerance=tolerance
    )
    if chosen.for_machines:
        document.emit(world, chosen, {"schema": document.SCHEMA, "rows": [vars(row) for row in rows]})
    else:
        shown = [(r.playbook, r.measure, r.number(r.before), r.number(r.after), r.change, r.judgement) for r in rows]
        heads = ("playbook", "measure", "before", "after", "change", "judgement")
        tables.show(world.console(), tables.table("", heads, shown))
    return ExitCode.FAILED if any(row.judgement == "worse" for row in rows) else ExitCode.OK
