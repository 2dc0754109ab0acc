"""`python -m ftar_core.bench recovery`: replicas are killed, frozen and cut off, in this project and in its peers,
one after the other with the same model, data, pace, supervisor and kill schedule.

stall_s: the longest time without a commit of a new step on the replicas that survive, minus a calm step's; wait_s:
the same of commit minus the last survivor's gradient. rejoin_stall_s: the same when the replica comes back.
steps_lost: computed and thrown away, or committed before and computed again. full_strength_s: from the fault until
all contribute again. effective_time: share of the time that went into new steps at full strength, at this schedule
(mtbf_s: one incident every so many seconds; mtbf_steps: so many calm steps). Rows whose fault ends with @mtbf: kills
every 1.8 x the stall of `restart`, whatever happens (1.8: FT-HSDP's 18 minutes over 10); `bound`: what is left there if
only the missing replica's own work is lost. The journals of all replicas are kept in --out; --from makes the rows
again, of several runs together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ftar_core.bench.models import PACED
from ftar_core.bench.peers.curve import RATIO, draw
from ftar_core.bench.peers.drive import FAULTS, Drive, name_of
from ftar_core.bench.peers.journals import Run, read_run
from ftar_core.bench.peers.place import Place
from ftar_core.bench.peers.rows import AT_RATIO, bounds, by_kind, check_pace, costs, curves, row
from ftar_core.bench.peers.signals import ended_by_signal
from ftar_core.bench.peers.systems import SYSTEMS, Wishes
from ftar_core.bench.report import BenchError, Column, Help, Report, UsageError, at_most, ended, number

OURS = ("ftar", "ftar+spare")
PEERS = ("torchft", "torchft-tuned", "restart")
INSTALL = "pip install 'ftctl[bench]'"
S = number(".3f")


def columns() -> list[Column]:
    return [
        Column("system", "system", 14),
        Column("fault", "fault", 14),
        Column("count", "count", 6),
        Column("stall_s_p50", "stall p50", 11, S),
        Column("stall_s_p95", "p95", 8, S),
        Column("stall_s_max", "max", 8, S),
        Column("steps_lost", "lost", 5, number(), at_most(0)),
        Column("rejoin_stall_s_p95", "rejoin p95", 11, S),
        Column("full_strength_s", "full after", 11, number(".1f", " s")),
        Column("effective_time", "effective", 10, lambda v: "-" if v is None else f"{float(v) * 100:.1f} %"),
        Column("mtbf_s", "MTBF", 9, number(".1f", " s")),
        Column("mtbf_steps", "in steps", 9, number(".0f")),
        Column("failed", "failed", 7, number(), at_most(0)),
    ]


def _names(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"{option}: there is no {name!r}; there are {', '.join(known)}")
    return list(dict.fromkeys(names))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ftar_core.bench recovery", description=__doc__, formatter_class=Help
    )
    parser.add_argument("--against", default=",".join(PEERS), help="peers to compare with, with commas between")
    parser.add_argument("--systems", metavar="LIST", help=f"only these, of {', '.join(SYSTEMS)}")
    faults = "; ".join(f"{name}: {what}" for name, what in FAULTS.items())
    parser.add_argument("--faults", default=",".join(FAULTS), help=faults)
    parser.add_argument("--count", type=int, default=3, help="incidents of each fault and system (0: only --mtbf-run)")
    parser.add_argument("--replicas", type=int, default=3, help="that contribute")
    parser.add_argument("--pace", type=float, default=200.0, metavar="MS", help="what forward and backward take")
    parser.add_argument(
        "--model",
        choices=tuple(PACED),
        default="example",
        help="what all systems train: 4 MB of gradients, or 0.6 (small), whose steps leave a short --pace most of its"
        " time",
    )
    parser.add_argument("--calm", type=int, default=10, metavar="STEPS", help="calm steps between two incidents")
    parser.add_argument(
        "--evict-after",
        type=float,
        default=0.5,
        metavar="S",
        help="silence that is death: ftar, torchft-tuned, restart",
    )
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS", help="of `restart`")
    parser.add_argument(
        "--restart-timeout",
        type=float,
        default=0.0,
        metavar="S",
        help="so long an all-reduce of `restart` waits for the others (0: --evict-after); a larger one where something"
        " else is running, since nobody has failed who is only late",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the victims and moments")
    parser.add_argument(
        "--mtbf-run", type=float, default=0.0, metavar="S", help="then kills at --mtbf for so many seconds a system"
    )
    parser.add_argument(
        "--mtbf", type=float, default=0.0, metavar="S", help=f"0: {RATIO:g} x the median stall of `restart`, sigkill"
    )
    parser.add_argument(
        "--slow-ok", action="store_true", help="go on where calm steps are > 20 %% over the pace: nothing to quote"
    )
    parser.add_argument("--out", type=Path, default=Path("recovery-journals"), help="directory of the journals")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="DIR", help="rows of the journals there; runs nothing"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw effective training time over MTBF")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="how to print")
    options = parser.parse_args(argv)
    options.faults = _names("--faults", options.faults, list(FAULTS))
    against = _names("--against", options.against, PEERS)
    options.systems = (
        [*OURS, *against] if options.systems is None else _names("--systems", options.systems, list(SYSTEMS))
    )
    for name, value, least, most in (
        ("--count", options.count, 0, 100_000),
        ("--replicas", options.replicas, 2, 16),
        ("--pace", options.pace, 10, 600_000),
        ("--calm", options.calm, 5, 10_000),
        ("--evict-after", options.evict_after, 0.25, 60),
        ("--checkpoint-every", options.checkpoint_every, 1, 1_000_000),
        ("--restart-timeout", options.restart_timeout, 0, 600),
        ("--mtbf-run", options.mtbf_run, 0, 1_000_000),
        ("--mtbf", options.mtbf, 0, 1_000_000),
    ):
        if not least <= value <= most:
            raise UsageError(f"{name} {value:g}: from {least:g} to {most:g}")
    if options.svg is not None and not options.svg.absolute().parent.is_dir():
        raise UsageError(f"--svg {options.svg}: there is no directory {options.svg.absolute().parent}")
    if options.source is not None and not options.source.is_dir():
        raise UsageError(f"--from {options.source}: there is no such directory")
    return options


def available(systems: Sequence[str]) -> list[str]:
    """Without those whose package is missing: that is said, and the rest runs."""
    missing = [name for name in systems if name.startswith("torchft") and find_spec("torchft") is None]
    if missing:
        say(f"{' and '.join(missing)}: torchft is not installed: {INSTALL}")
    return [name for name in systems if name not in missing]


def say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def measure(options: argparse.Namespace, report: Report) -> list[Path]:
    """Run everything; the directories of journals below --out."""
    made: list[Path] = []
    systems = available(options.systems)
    wishes = Wishes(
        replicas=options.replicas,
        step_ms=options.pace,
        model=options.model,
        seed=options.seed,
        evict_s=options.evict_after,
        checkpoint_every=options.checkpoint_every,
        restart_timeout_s=options.restart_timeout or options.evict_after,
    )
    parts = [(fault, system) for fault in options.faults for system in systems] if options.count else []
    total = len(parts) + (len(systems) if options.mtbf_run else 0)
    done = 0

    def tell(what: str, share: float) -> None:
        report.step(what, (done + share) / max(1, total))

    with Place(options.replicas + 1) as place:
        if place.why is not None:
            say(f"{place.why}: on loopback instead" + ("; no node-loss" if "node-loss" in options.faults else ""))
            parts = [(fault, system) for fault, system in parts if fault != "node-loss"]

        def drive(system: str, fault: str, label: str) -> Drive:
            directory = options.out / name_of(system, label)
            made.append(directory)
            named = f"{system}, {label}"
            return Drive(
                *(system, fault, label),
                wishes=wishes,
                place=place,
                directory=directory,
                tell=lambda what, share: tell(f"{named}: {what}", share),
            )

        for fault, system in parts:
            with drive(system, fault, fault) as one:
                one.begin(options.slow_ok)
                one.incidents(options.count, options.calm)
            done += 1
        if options.mtbf_run:
            mtbf_s = options.mtbf or RATIO * restart_s(runs_of(below(options.out)))
            for system in systems:
                with drive(system, "sigkill", "sigkill" + AT_RATIO) as one:
                    one.begin(options.slow_ok)
                    one.schedule(options.mtbf_run, mtbf_s)
                done += 1
    return made


def restart_s(runs: Sequence[Run]) -> float:
    """The median stall of `restart` after a kill."""
    mine = [run for run in runs if (run.about["system"], run.about["fault"]) == ("restart", "sigkill")]
    found, _ = costs(mine)
    if not found:
        raise BenchError(
            "--mtbf-run: the restart time has not been measured",
            hint="add restart to --against and sigkill to --faults, or give --mtbf",
        )
    return statistics.median(c.stall for c in found)


def below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_dir())


def runs_of(directories: Sequence[Path]) -> list[Run]:
    """What was measured. Directories without an about.json (a run that was killed) are left out, and named."""
    found = []
    for directory in directories:
        if (directory / "about.json").exists():
            found.append(read_run(directory))
        else:
            say(f"{directory}: that run was ended before its first incident; left out")
    return found


def show(options: argparse.Namespace, report: Report, directories: Sequence[Path]) -> None:
    runs = runs_of(directories)
    if not runs:
        raise BenchError("there are no journals to read", hint="python -m ftar_core.bench recovery --out DIR")
    if not options.slow_ok:
        check_pace(runs)
    groups = by_kind(runs, list(SYSTEMS))
    rows = [row(group) for group in groups.values()]
    replicas = int(runs[0].about["wanted"])
    bounds(rows, replicas)
    for one in rows:
        report.add(one)
    for name, notes in {str(one["system"]): one["notes"] for one in rows}.items():
        say(f"{name}: {notes}")
    if options.svg is not None:
        drawn = curves(rows, "sigkill")
        if not drawn:
            raise BenchError("--svg: there are no incidents of sigkill to draw from")
        mark_s = next((RATIO * float(r["stall_s_p50"]) for r in rows if _is_restart(r) and r["stall_s_p50"]), None)
        title = f"Effective training time, {replicas} replicas, one process killed at a time"
        options.svg.write_text(draw(title, drawn, replicas, mark_s))


def _is_restart(one: dict[str, float | int | str | None]) -> bool:
    return one["system"] == "restart" and one["fault"] == "sigkill"


def run(argv: Sequence[str]) -> int:
    options = parse(argv)
    with ended_by_signal(), Report("recovery", columns(), options.output) as report:
        if options.source is None:
            options.out.mkdir(parents=True, exist_ok=True)
            directories = measure(options, report)
            say(f"the journals are in {options.out}")
        else:
            directories = below(options.source)
        show(options, report, directories)
    return 0


def main(argv: Sequence[str]) -> int:
    return ended(lambda: run(argv))
