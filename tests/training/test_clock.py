"""A wall clock that jumps by hours: dates in the journals are odd, and nothing else is.

The coordinator is a real process whose CLOCK_REALTIME is replaced in the C library (a preloaded one); replicas have
`time.time` replaced. What may read the wall clock at all is a list."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from pathlib import Path

import pytest

import ftar_core

from .conftest import Job

ROOT = Path(ftar_core.__file__).parent.parent

# Every reader of the wall clock, and what it is for. None of it is compared with anything but itself.
DATES = {
    "ftar_core/coordinator/store.py": "when the record was written, for people",
    "ftar_core/runtime/clock.py": "dates of events and of status",
    "ftar_core/training/checkpoints/keeper.py": "the date in a checkpoint's manifest",
    "ftar_core/training/journal.py": "dates of lines, beside the monotonic time",
    "ftar_core/bench/commit_leaders.py": "beside the kernel's receive stamps, which are of this clock",
    "ftar_core/bench/commit_run.py": "beside the kernel's receive stamps, which are of this clock",
    "ftar_core/bench/commit_ranks.py": "beside the kernel's receive stamps, which are of this clock",
    "ftar_core/ncclrun/job.py": "dates in the report",
    "agents/host/clock.py": "dates of events",
    "agents/host/coordinators.py": "a process's age against its own date; a wrong one refuses the fault",
    "agents/views.py": "the moment of an answer",
    "agents/events.py": "dates of events",
    "agents/cordon.py": "since when a node is set apart, for people; its age is what an operator reads",
    "agents/assembly.py": "when an Xid was injected into the agent, for people",
    "agents/http/audited.py": "when a request came, for people",
    "agents/monitors/poller.py": "when counters were read, beside the monotonic time; they outlive a reboot",
    "agents/helper/audit.py": "when a request came, for people",
    "agents/http/metrics.py": "how old a checkpoint is, by the date in its manifest",
    "agents/halt.py": "since when faults are halted, for people",
    "agents/monitors/nvml_child.py": "when an Xid was seen",
    "agents/evidence.py": "when stacks were looked at",
    "agents/recovery/forks.py": "dates in logs and of exits",
    "ftctl/context.py": "ages of what agents date, shown to people",
    "ftctl/lab/lifecycle.py": "when the lab was made",
    "ftctl/lab/credentials.py": "validity of the lab's certificates",
}
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}

SHIM = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Each reading of the wall clock is hours before or behind the last. */
int clock_gettime(clockid_t clock, struct timespec *out) {
    static unsigned readings;
    int result = (int)syscall(SYS_clock_gettime, clock, out);
    if (result == 0 && clock == CLOCK_REALTIME)
        out->tv_sec += 3600 * (7 * __atomic_add_fetch(&readings, 1, __ATOMIC_RELAXED) % 11);
    return result;
}
"""


def test_who_reads_the_wall_clock_is_known() -> None:
    readers = set()
    for package in ("ftar_core", "agents", "ftctl"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                    if (owner, node.attr) in WALL:
                        readers.add(str(path.relative_to(ROOT)))
        for path in [*(ROOT / package).rglob("*.cpp"), *(ROOT / package).rglob("*.h")]:
            text = path.read_text()
            if "CLOCK_REALTIME" in text or "system_clock" in text or "gettimeofday" in text:
                readers.add(str(path.relative_to(ROOT)))
    assert readers == set(DATES), "decide on time.monotonic(); a date for people goes on the list, with its use"


def test_a_job_does_not_mind_clocks_that_jump_by_hours(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, shim = tmp_path / "jump.c", tmp_path / "jump.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(shim), str(source)], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    job.coordinator(replicas=2, options=("--spares", "1"))
    monkeypatch.delenv("LD_PRELOAD")
    job.start("r0", "r1", "r2", steps=120, step_ms=20, clock_jumps=True)
    job.wait_step("r0", 40)
    job.kill("r1")
    job.assert_finished("r0", "r2")
    job.assert_identical("r0", "r2")
    assert job.steps("r0") == list(range(1, 121))
    assert len(job.lines("r0", "step")[-1]["contributors"]) == 2
    told = [json.loads(line) for line in (job.path / "store" / "events.jsonl").read_text().splitlines()]
    kinds = [event["kind"] for event in told]
    assert kinds.count("replica.lost") == 1, "the one that was killed"
    assert not {"replica.suspect", "detector.reset", "network.trouble"} & set(kinds)
    dates = [event["time"] for event in told]
    assert max(dates) - min(dates) > 3600, "the clock of the coordinator did jump"
    seen = [line["time"] for line in job.lines("r0", "step")]
    assert max(seen) - min(seen) > 3600
