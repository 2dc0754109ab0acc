"""The point-to-point benchmark: three systems really measured, and what it says to wrong input."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ftar_core.native._core")
from ftar_core.bench.p2p import Case, row
from ftar_core.bench.report import UsageError, parse_sizes, percentile, shown

from .runs import rows_of


def test_the_plugin_is_measured_beside_a_bare_socket_and_unprotected() -> None:
    rows = rows_of("p2p", "--sizes", "1,256K", "--in-flight", "4", "--seconds", "0.05", "--rounds", "2")
    cases = [(line["bytes"], line["in_flight"]) for line in rows]
    assert cases == [(4096, 1), (1, 4), (262144, 4)]
    for line in rows:
        assert line["rounds"] == 2
        assert min(line["ours_us"], line["socket_us"], line["unprotected_us"]) > 0
        assert line["ratio_socket"] > 0
        assert line["protection_cost"] > -1


def test_a_ratio_is_the_median_of_the_rounds_and_above_one_when_ours_is_faster() -> None:
    found = {"ours": [10.0, 100.0, 10.0], "socket": [20.0, 50.0, 11.0], "unprotected": [8.0, 100.0, 10.0]}
    shown = row(Case(4096, 8), found)
    assert (shown["ours_us"], shown["socket_us"], shown["unprotected_us"]) == (10, 20, 10)
    assert (shown["ratio_socket"], shown["protection_cost"]) == (1.1, 0.0)


def test_its_processes_end_with_it_however_it_ends() -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "ftar_core.bench", "p2p", "--sizes", "1M", "--seconds", "60"], stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 90
        while len(children := _children(running.pid)) < 6:  # two ends of three systems
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running.send_signal(signal.SIGKILL)
    finally:
        running.kill()
        running.wait()
    while any(_alive(pid) for pid in children):
        assert time.monotonic() < deadline, "a process of the benchmark outlived it"
        time.sleep(0.02)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_sizes() -> None:
    assert parse_sizes("4, 1K,16m") == [4, 1024, 16 << 20]
    assert shown(16 << 20) == "16 MiB"
    with pytest.raises(UsageError, match="multiple of 4"):
        parse_sizes("6", multiple=4)


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile(list(range(1, 101)), 0.99) == 99
    assert percentile(list(range(1, 101)), 1) == 100
    assert percentile([7], 0.99) == 7
