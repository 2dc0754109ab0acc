"""`python -m ftar_core.ncclrun`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import ftar_core.ncclrun
from ftar_core import nccl
from ftar_core.errors import FtarError, SettingsError
from ftar_core.ncclabi import PluginError
from ftar_core.ncclrun.job import Job, Options, say
from ftar_core.ncclrun.meeting import MAX_WORLD, PeerGone, Place
from ftar_core.wire.exits import RankExit

WRONG = 1
MAX_CHANNELS = 16


def read_place(environ: Mapping[str, str]) -> Place:
    """Raises SettingsError."""
    numbers = {}
    for name, low, high in (("RANK", 0, MAX_WORLD - 1), ("WORLD_SIZE", 2, MAX_WORLD), ("MASTER_PORT", 1, 65535)):
        text = environ.get(name, "")
        if not (text.isdecimal() and low <= int(text) <= high):
            raise SettingsError(f"{name}={text}: not a number of {low} to {high}", hint="set it as torchrun does")
        numbers[name] = int(text)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise SettingsError(f"RANK={numbers['RANK']}: not below WORLD_SIZE={numbers['WORLD_SIZE']}")
    address = environ.get("MASTER_ADDR", "")
    if not address:
        raise SettingsError("MASTER_ADDR is not set", hint="the address at which rank 0 listens")
    return Place(numbers["RANK"], numbers["WORLD_SIZE"], address, numbers["MASTER_PORT"])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ftar_core.ncclrun", description=(ftar_core.ncclrun.__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--rails", default=None, help="FTAR_NET_RAILS; default: all NICs but the management NIC")
    parser.add_argument("--token-file", default=None, help="FTAR_TOKEN_FILE")
    parser.add_argument(
        "--timeout-s", type=float, default=None, help="all rails dead for so long: an error; default 30"
    )
    parser.add_argument("--channels", type=int, default=2, help="connections from each rank to each other; default 2")
    parser.add_argument("--round-ms", type=int, default=200, help="from round to round; 0: without a pause")
    parser.add_argument("--rounds", type=int, default=0, help="end after so many; 0: go on until SIGTERM")
    parser.add_argument("--report", type=Path, default=None, help="write counts to this file, twice a second")
    parser.add_argument("--allow-sockets", action="store_true", help="also where an RDMA port is active")
    chosen = parser.parse_args(argv)
    if not 1 <= chosen.channels <= MAX_CHANNELS:
        parser.error(f"--channels {chosen.channels}: not in 1 to {MAX_CHANNELS}")
    if chosen.rounds < 0 or not 0 <= chosen.round_ms <= 60_000:
        parser.error("--rounds and --round-ms: not below 0, and at most a minute a round")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    chosen = _arguments(argv)
    try:
        place = read_place(os.environ)
        nccl.enable(
            rails=chosen.rails,
            token_file=chosen.token_file,
            timeout_s=chosen.timeout_s,
            allow_sockets=chosen.allow_sockets,
        )
    except FtarError as error:
        say(f"{error}" + (f" ({error.hint})" if error.hint else ""))
        return RankExit.USAGE
    job = Job(place, Options(chosen.channels, chosen.round_ms / 1000, chosen.rounds, chosen.report))

    def end(_number: int, _frame: object) -> None:
        job.ended = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        job.run()
    except PeerGone as error:
        if not job.ended:
            say(str(error))
            return RankExit.RESTART
    except PluginError as error:
        say(f"{error}; the plugin said:" + "".join(f"\n  {line}" for line in error.said or ("nothing",)))
        return RankExit.USAGE
    except OSError as error:
        say(f"{place.address}:{place.port}: {error.strerror or error}")
        return RankExit.RESTART
    counts = job.counts
    say(
        f"rank {place.rank}: {counts.messages_checked} messages, {counts.bytes_checked} bytes checked,"
        f" {counts.bytes_wrong} wrong{' (' + counts.first_wrong + ')' if counts.first_wrong else ''},"
        f" longest {counts.longest_ms:.1f} ms"
    )
    return WRONG if counts.bytes_wrong else RankExit.FINISHED


if __name__ == "__main__":
    sys.exit(main())
