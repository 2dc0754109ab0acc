"""The command line of ftar-coordinator: options derived from the settings they set, so that none can be forgotten.

Times are seconds, or a number with a unit (300ms, 2s, 10m, 1h). `--profile` chooses the detection settings to start
from; an option given by hand wins over the profile.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from ftar_core.coordinator.peers import Tokens
from ftar_core.errors import SettingsError
from ftar_core.protocol.config import LAB_DETECTION, Detection, JobConfig
from ftar_core.wire.address import COORDINATOR_PORT, Address, parse_address
from ftar_core.wire.ids import valid_name
from ftar_core.wire.tokens import read_token

PROFILES = {"default": Detection(), "lab": LAB_DETECTION}
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(ms|s|m|h|)\Z")

# field -> what it means, for --help. The option is the field's name without its unit.
DETECTION_HELP = {
    "heartbeat_interval_s": "how often a rank sends a heartbeat",
    "suspect_after_s": "silence after which a replica is shown as suspect",
    "evict_after_s": "silence after which a replica is taken out",
    "hung_after_s": "a replica that keeps the others waiting this long may be hung",
    "hung_factor": "... and at least so many times the usual step time",
    "evict_hung": "take a hung replica out, instead of only showing it",
    "evidence_wait_s": "... and how long to wait before that for its agent to say what its threads do",
    "evict_diverged": "take out a replica whose results differ from those of the majority, instead of only saying so",
    "explain_s": "... and how long to wait before that for the replicas to say what of their results it is",
    "straggler_factor": "a replica that computes this many times the median of the others is a straggler",
    "straggler_steps": "... after so many such steps in a row",
    "unreachable_wait_s": "how long to collect reports about a dead link before one of its ends is taken out",
    "max_evictions": "most automatic evictions within the eviction window (0: no limit)",
    "eviction_window_s": "the eviction window",
}
JOB_HELP = {
    "catchup_mbit": "what all replicas that catch up may fetch together, in Mbit/s (0: no limit)",
    "spares": "hot spares wanted beside the replicas: they follow, and take the place of one that is lost or drained",
    "min_replicas": "hold the job while fewer replicas than this contribute",
    "start_timeout_s": "start without the missing replicas after this time, if there are at least --min-replicas",
    "steps": "end the job after this many steps (0: until `ftctl` or the training scripts end it)",
    "recovery_wait_s": "after a restart of the coordinator, how long to wait for all recorded replicas",
    "gather_s": "after the loss of all replicas at once, how long to wait for them",
    "hold_exit_s": "end a job that has been held for this long",
    "member_wait_s": "how long replicas wait for a lost coordinator",
    "prepare_s": "try again to let a replica join if its links are not up after this time",
    "promote_wait_s": "after a loss, how long the commit of that step waits until a hot spare is connected",
    "record_retry_s": "how often to try again to write the record after a failure",
    "record_check_s": "how often to write the record anew, so that a full disk shows before it matters",
    "finish_wait_s": "after the last step, how long to wait for replicas that have not heard of it",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message, hint="see: ftar-coordinator --help")


@dataclass(frozen=True)
class Options:
    config: JobConfig
    tokens: Tokens
    store: Path
    listen: Address
    new: bool
    record_lost: bool
    port_file: Path | None
    verbose: bool


def duration_s(text: str) -> float:
    """Seconds in "2", "2s", "300ms", "10m", "1h"."""
    match = _DURATION.match(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write for example 300ms, 2s or 10m")
    return float(match[1]) * _UNITS_S[match[2]]


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return int(text)


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def option_of(field_name: str) -> str:
    return "--" + field_name.removesuffix("_s").replace("_", "-")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ftar-coordinator",
        description="Decides, for one training job, who contributes to each step and when a step is committed.",
        epilog="Exit codes: 0 the job is finished; 1 it cannot go on; 2 wrong settings; 75 stopped or replaced: start"
        " it again, the replicas wait.",
        allow_abbrev=False,
    )
    job = parser.add_argument_group("the job")
    job.add_argument("--job", required=True, metavar="NAME", help="name of the job")
    job.add_argument("--replicas", required=True, type=_count, metavar="N", help="replicas the job wants")
    for name, text in JOB_HELP.items():
        default = JobConfig.__dataclass_fields__[name].default
        if name.endswith("_s"):
            job.add_argument(
                option_of(name),
                dest=name,
                type=duration_s,
                default=default,
                metavar="TIME",
                help=f"{text} ({default:g} s)",
            )
        else:
            job.add_argument(
                option_of(name), dest=name, type=_count, default=default, metavar="N", help=f"{text} ({default})"
            )
    job.add_argument(
        "--nonfinite",
        choices=("skip", "fail"),
        default="skip",
        help="what all replicas do with a step whose gradients are not finite: no update, or end the job (skip)",
    )
    job.add_argument(
        "--on-unattributed",
        choices=("hold", "continue"),
        default="hold",
        help="results of replicas differ, and nobody can say whose are wrong: hold the job, or go on and say so (hold)",
    )
    place = parser.add_argument_group("place")
    place.add_argument(
        "--store", required=True, type=Path, metavar="DIR", help="directory of the record; made if it is not there"
    )
    place.add_argument(
        "--listen",
        default=f"127.0.0.1:{COORDINATOR_PORT}",
        metavar="HOST:PORT",
        help=f"where replicas and agents connect, TCP and UDP (127.0.0.1:{COORDINATOR_PORT}); port 0 takes a free one",
    )
    place.add_argument("--token-file", required=True, type=Path, metavar="FILE", help="the job token (mode 0600)")
    place.add_argument(
        "--operator-token-file",
        type=Path,
        metavar="FILE",
        help="the operator token (mode 0600); without it no operator commands are taken",
    )
    place.add_argument("--port-file", type=Path, metavar="FILE", help="write the port number there once it listens")
    place.add_argument("--verbose", action="store_true", help="log more")
    start = parser.add_argument_group("starting on an old store")
    start.add_argument("--new", action="store_true", help="start a new job, put the record of the old one aside")
    start.add_argument(
        "--record-lost",
        action="store_true",
        help="the record cannot be read: put it aside and go on from what the replicas report",
    )
    found = parser.add_argument_group("detection of failures")
    found.add_argument("--profile", choices=sorted(PROFILES), default="default", help="settings to start from")
    for name, text in DETECTION_HELP.items():
        values = ", ".join(f"{profile} {_shown(getattr(d, name), name)}" for profile, d in PROFILES.items())
        if isinstance(getattr(Detection(), name), bool):
            found.add_argument(
                option_of(name),
                dest=name,
                action=argparse.BooleanOptionalAction,
                default=None,
                help=f"{text} ({values})",
            )
        else:
            kind = (
                duration_s
                if name.endswith("_s")
                else _count
                if isinstance(getattr(Detection(), name), int)
                else _factor
            )
            metavar = "TIME" if name.endswith("_s") else "N"
            found.add_argument(
                option_of(name), dest=name, type=kind, default=None, metavar=metavar, help=f"{text} ({values})"
            )
    return parser


def parse(arguments: Sequence[str]) -> Options:
    """Checked options. Raises SettingsError; exits after --help."""
    given = build_parser().parse_args(arguments)
    if not valid_name(given.job):
        raise SettingsError(
            f"--job {given.job!r}: not a valid name",
            hint="use 1 to 63 of a-z, 0-9, '.', '_' and '-', with a letter or digit at both ends",
        )
    try:
        listen = parse_address(given.listen, any_port=True)
    except ValueError as error:
        raise SettingsError(f"--listen {error}", hint="for example --listen 0.0.0.0:7600") from None
    if given.new and given.record_lost:
        raise SettingsError("--new and --record-lost exclude each other", hint="--new needs no record at all")
    if given.port_file is not None and not given.port_file.parent.is_dir():
        raise SettingsError(f"--port-file {given.port_file}: no such directory", hint="choose another file")
    base = PROFILES[given.profile]
    changed = {f.name: getattr(given, f.name) for f in fields(Detection) if getattr(given, f.name) is not None}
    detection = Detection(**{f.name: getattr(base, f.name) for f in fields(Detection)} | changed)
    try:
        config = JobConfig(
            job=given.job,
            replicas=given.replicas,
            detection=detection,
            fail_on_nonfinite=given.nonfinite == "fail",
            continue_unattributed=given.on_unattributed == "continue",
            **{name: getattr(given, name) for name in JOB_HELP},
        )
    except ValueError as error:
        raise SettingsError(str(error), hint="see: ftar-coordinator --help") from None
    return Options(
        config=config,
        tokens=_tokens(given.token_file, given.operator_token_file),
        store=given.store,
        listen=listen,
        new=given.new,
        record_lost=given.record_lost,
        port_file=given.port_file,
        verbose=given.verbose,
    )


def _tokens(member_file: Path, operator_file: Path | None) -> Tokens:
    member = read_token(member_file, "--token-file")
    if operator_file is None:
        return Tokens(member)
    operator = read_token(operator_file, "--operator-token-file")
    if operator == member:
        raise SettingsError(
            "--operator-token-file and --token-file hold the same token, so every replica could evict the others",
            hint=f"make another one: (umask 077; head -c 32 /dev/urandom | base64 > {operator_file})",
        )
    return Tokens(member, operator)


def _shown(value: float | bool, name: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g} s" if name.endswith("_s") else f"{value:g}"
