"""`ftctl lab`: a whole cluster on this machine, from network namespaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from ftctl.context import World, current
from ftctl.exit_codes import ExitCode
from ftctl.options import OutputOption, plain_group

if TYPE_CHECKING:
    from ftctl.lab.layout import LabOptions
    from ftctl.lab.registry import LabInfo
    from ftctl.lab.teardown import Leftovers

app = plain_group("A whole cluster on this machine, from network namespaces.")

NameOption = Annotated[str, typer.Option("--name", help="Name of the lab, and of its job.")]
ReplicasOption = Annotated[int, typer.Option("--replicas", help="How many replicas train.")]
NodesOption = Annotated[
    int, typer.Option("--nodes-per-replica", help="Nodes over which the ranks of a replica are spread evenly.")
]
RanksOption = Annotated[
    int, typer.Option("--ranks", help="Processes of each replica; several share its model (FSDP2 over gloo).")
]
RailsOption = Annotated[int, typer.Option("--rails", help="NICs of each node that carry gradients.")]
RateOption = Annotated[
    str, typer.Option("--rate", metavar="RATE", help="Speed of a rail, such as 1gbit [default: none].")
]
StepOption = Annotated[int, typer.Option("--step-ms", help="Length of a training step, in ms; 0: as fast as it goes.")]
StepsOption = Annotated[int, typer.Option("--steps", help="End after this many steps; 0: go on until `lab down`.")]
SeedOption = Annotated[
    int, typer.Option("--seed", help="Of the model's first parameters and of the order of the data.")
]
MinReplicasOption = Annotated[int, typer.Option("--min-replicas", help="With fewer contributors the job holds.")]
SparesOption = Annotated[
    int, typer.Option("--spares", help="Replicas more that only follow, and replace one that is lost or drained.")
]
EvictHungOption = Annotated[
    bool, typer.Option("--evict-hung", help="Take a hung replica out by itself, with the evidence in the event.")
]
EvictDivergedOption = Annotated[
    bool,
    typer.Option("--evict-diverged", help="Take a replica with other results than the rest out; it fetches theirs."),
]
JobOption = Annotated[
    str,
    typer.Option("--job", metavar="JOB", help="training, or nccl: a rank a node moves bytes through the NCCL plugin."),
]
CheckpointOption = Annotated[
    str,
    typer.Option(
        "--checkpoint-every",
        metavar="N",
        help="Keep checkpoints: every N steps, or every 30s, 10min, 1h [default: none].",
    ),
]
GpusOption = Annotated[int, typer.Option("--gpus", help="Simulated GPUs of each node; no training runs on them.")]
ProfileOption = Annotated[str, typer.Option("--gpu-profile", metavar="MODEL", help="Their model: h100 or h200.")]
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="MODE",
        help="What agents do about verdicts: observe, recommend or act [default: act with --gpus, else observe].",
    ),
]
PolicyFileOption = Annotated[
    str, typer.Option("--policy-file", metavar="FILE", help="The policy's rules [default: those that ship].")
]
WhichOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--name", help="Which lab [default: the only one].", show_default=False),
]


@app.command()
def up(
    *,
    name: NameOption = "lab",
    replicas: ReplicasOption = 3,
    nodes_per_replica: NodesOption = 1,
    ranks: RanksOption = 1,
    rails: RailsOption = 2,
    rate: RateOption = "",
    step_ms: StepOption = 200,
    steps: StepsOption = 0,
    seed: SeedOption = 0,
    min_replicas: MinReplicasOption = 1,
    spares: SparesOption = 0,
    evict_hung: EvictHungOption = False,
    evict_diverged: EvictDivergedOption = False,
    job: JobOption = "training",
    checkpoint_every: CheckpointOption = "",
    gpus: GpusOption = 0,
    gpu_profile: ProfileOption = "h100",
    policy: PolicyOption = "",
    policy_file: PolicyFileOption = "",
    output: OutputOption = None,
) -> None:
    """Make a lab: namespaces, links, coordinator, agents and training processes. Returns when all replicas train.

    With --job nccl there is no coordinator and no training: one process a node exchanges bytes with all others through
    the NCCL plugin, every --step-ms, and checks each of them.

    Without root it is made inside a user namespace. Ctrl-C before the end leaves nothing behind.
    """
    from ftctl.config import output_only
    from ftctl.lab import lifecycle
    from ftctl.lab.configure import wished_net_options
    from ftctl.lab.layout import LabOptions
    from ftctl.lab.progress import progress
    from ftctl.lab.ready import wait_until_training

    world = current()
    chosen = output_only(world, output)
    options = LabOptions(
        name=name,
        replicas=replicas,
        nodes_per_replica=nodes_per_replica,
        ranks=ranks,
        rails=rails,
        rate=rate,
        step_ms=step_ms,
        steps=steps,
        seed=seed,
        min_replicas=min_replicas,
        spares=spares,
        evict_hung=evict_hung,
        evict_diverged=evict_diverged,
        job=job,
        checkpoint_every=checkpoint_every,
        gpus=gpus,
        gpu_profile=gpu_profile,
        policy=policy,
        policy_file=policy_file,
    )
    with progress(world, f"making lab {name}") as talk:
        lab = lifecycle.bring_up(
            options, lambda lab: world.run(wait_until_training(world, lab, talk.now)), progress=talk.now
        )
        talk.done(f"lab {name} is up: {_what_runs(options, wished_net_options())}")
    if chosen.for_machines:
        from ftctl.render.document import emit

        nodes = [{"name": node.name, "replica": node.replica} for node in lab.nodes]
        emit(
            world,
            chosen,
            {
                "schema": 1,
                "name": name,
                "dir": str(lab.paths.root),
                "inventory": str(lab.paths.inventory),
                "nodes": nodes,
            },
        )
        return
    _say_next(world, lab.manifest.options)


def _what_runs(options: LabOptions, wished: str) -> str:
    """`wished`: FTAR_NET_OPTIONS of this shell, which ranks of the plugin get."""
    from ftctl.lab.layout import NCCL

    rails, spares = f"{options.rails} rails each", options.spares
    if options.job == NCCL:
        own = f", with the FTAR_NET_OPTIONS of this shell ({wished})" if wished else ""
        return f"{options.replicas} ranks run the NCCL plugin, {rails}{own}"
    beside = f", {spares} hot spare{'' if spares == 1 else 's'}" if spares else ""
    each = rails if options.ranks == 1 else f"{options.ranks} ranks and {rails}"
    return f"{options.replicas} replicas train{beside}, {each}"


def _say_next(world: World, options: LabOptions) -> None:
    which = "" if options.name == "lab" else f" --lab {options.name}"
    node, rail = ("node1" if options.replicas > 1 else "node0"), "rail0"
    down = "ftctl lab down" + ("" if options.name == "lab" else f" --name {options.name}")
    nccl = options.job == "nccl"
    lines = [
        (f"ftctl status{which} --watch", "see its links" if nccl else "see it train"),
        (f"ftctl inject link-down --node {node} --nic {rail} --duration 20s{which}", "unplug a rail"),
        (f"ftctl links{which} --node {node}", "rail by rail: state, reason, where the data goes")
        if nccl
        else (f"ftctl drain replica r0 --reason test{which}", "let a replica leave; rejoin brings it back"),
        *([("ftctl lab status", "messages and bytes checked")] if nccl else []),
        (down, "remove it all"),
    ]
    width = max(len(command) for command, _ in lines)
    world.out("next:")
    for command, what in lines:
        world.out(f"  {command:<{width}}  {what}")


@app.command()
def down(
    name: WhichOption = None,
    every: Annotated[bool, typer.Option("--all", help="All labs of this user.")] = False,
) -> ExitCode | None:
    """Remove a lab: its processes, and with them its namespaces and links, and its files. Works after any crash."""
    from ftctl.errors import CliError, UsageProblem
    from ftctl.lab import lifecycle
    from ftctl.lab.registry import list_labs

    world = current()
    if name is not None and every:
        raise UsageProblem("--name and --all", "only one of the two can say which lab is meant")
    labs = list_labs()
    chosen = labs if every else [_choose(name, labs)] if name is not None or labs else []
    if not chosen:
        world.say("no lab on this machine")
        return None
    failed = False
    for lab in chosen:
        try:
            left: Leftovers | None = lifecycle.take_down(lab.name)
        except CliError as error:
            if len(chosen) == 1:
                raise
            world.say(f"error: {error}")
            failed = True
            continue
        for line in left.lines() if left is not None else ():
            world.say(f"error: lab {lab.name}: still there: {line}")
            failed = True
        if left is not None and not left.lines():
            world.say(f"lab {lab.name} is removed")
    return ExitCode.FAILED if failed else None


def _choose(name: str | None, labs: list[LabInfo]) -> LabInfo:
    """The lab that is meant. Raises UsageProblem."""
    from ftctl.errors import UsageProblem

    names = ", ".join(lab.name for lab in labs)
    for lab in labs:
        if lab.name == name or (name is None and len(labs) == 1):
            return lab
    if name is not None:
        raise UsageProblem(
            f"lab {name}", f"there is none of this name (there is: {names or 'no lab'})", "ftctl lab status"
        )
    if not labs:
        raise UsageProblem("lab", "none on this machine", "ftctl lab up")
    raise UsageProblem("lab", f"there are several: {names}", f"say which one: --name {labs[0].name}")


@app.command()
def status(output: OutputOption = None) -> None:
    """Show the labs of this user and their processes. `ftctl status` shows what the cluster in a lab does."""
    from ftctl.config import output_only
    from ftctl.lab.registry import list_labs
    from ftctl.render import lab as view

    world = current()
    chosen = output_only(world, output)
    labs = list_labs()
    if chosen.for_machines:
        from ftctl.render.document import emit

        emit(world, chosen, view.document(labs))
    elif not labs:
        world.say("no lab on this machine (next: ftctl lab up)")
    else:
        from ftctl.render.tables import show

        show(world.console(), *view.tables(labs, world.unix_time()))


@app.command()
def demo(
    *,
    rate: RateOption = "",
    step_ms: StepOption = 200,
    seed: SeedOption = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the lab as it is at the end.")] = False,
    output: OutputOption = None,
) -> ExitCode:
    """Unplug a rail, kill a replica, drain another, while three replicas train; then say what each of it cost.

    Brings its own lab and removes it. Exit code 0 only if nobody was held up for longer than the limits, nothing was
    lost, all replicas ended bit-identical, the loss went down, and nothing was left behind.
    """
    from ftctl.config import output_only
    from ftctl.lab import demo_run
    from ftctl.lab.progress import progress

    world = current()
    chosen = output_only(world, output)
    with progress(world, "making a lab") as talk:
        result = demo_run.run(world, talk, rate=rate, step_ms=step_ms, seed=seed, keep=keep)
    report = result.report
    if chosen.for_machines:
        from ftctl.render.document import emit

        emit(world, chosen, report.document())
    else:
        from ftctl.render.tables import show

        world.out()
        show(world.console(), *report.tables())
    for failure in report.failures():
        world.say(f"failed: {failure}")
    if result.kept is not None:
        world.say(f"logs and journals: {result.kept}")
    if result.path is not None:
        world.say(f"report: {result.path}")
    world.say("passed" if report.passed else "not passed")
    return ExitCode.OK if report.passed else ExitCode.FAILED


@app.command(name="exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def execute(
    node: Annotated[str, typer.Argument(help="node0, node1, ... or fabric.")],
    command: Annotated[list[str], typer.Argument(help="The command, after --.")],
    name: WhichOption = None,
) -> None:
    """Run a command in the network of a node, such as: ftctl lab exec node0 -- ip addr."""
    import os

    from ftctl.errors import CliError, UsageProblem
    from ftctl.lab import namespaces
    from ftctl.lab.manifest import MARKER, KeeperState, ManifestError, load
    from ftctl.lab.registry import list_labs

    command = command[1:] if command[0] == "--" else command
    if not command:
        raise UsageProblem("lab exec", "no command is given", "ftctl lab exec node0 -- ip addr")
    lab = _choose(name, list_labs())
    down = f"ftctl lab down --name {lab.name}"
    try:
        keeper = load(lab.paths.keeper_state, KeeperState)
    except ManifestError as error:
        raise CliError(f"lab {lab.name}", str(error), down) from None
    if node not in keeper.namespaces:
        raise UsageProblem(f"node {node}", f"not in lab {lab.name} (it has {', '.join(keeper.namespaces)})")
    try:
        namespaces.enter(keeper.pid, keeper.namespaces[node])
    except OSError as error:
        raise CliError(
            f"lab {lab.name}", f"its keeper (pid {keeper.pid}) cannot be reached: {error.strerror or error}", down
        ) from None
    marked = {MARKER: lab.manifest.uuid} if lab.manifest is not None else {}
    try:
        os.execvpe(command[0], command, {**os.environ, "FTCTL_LAB": lab.name, **marked})  # noqa: S606 - as typed
    except OSError as error:
        raise UsageProblem(command[0], error.strerror or str(error)) from None
