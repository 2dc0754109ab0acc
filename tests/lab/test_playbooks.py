"""The quick playbooks that ship, in a lab, as CI runs them.

How long recovery took is for `make chaos` to judge; a busy machine fails no test here. What must hold on any machine is
asked: nobody's work is thrown away, no bits differ, every replica comes back, and nothing is left behind.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ftctl.lab.registry import list_labs

from .conftest import needs_namespaces

pytestmark = [needs_namespaces, pytest.mark.timeout(600)]
PLAYBOOKS = Path(__file__).parents[2] / "playbooks"
OF_A_STOPWATCH = ("detect_ms", "stall_ms", "rejoin_s")


@pytest.mark.parametrize(
    ("which", "names"),
    [
        ([str(PLAYBOOKS / "primary-rail-down.yaml")], {"primary-rail-down"}),
        pytest.param(
            [str(PLAYBOOKS), "--tag", "quick"],
            {"control", "primary-rail-down", "replica-killed", "drain-and-rejoin"},
            marks=pytest.mark.soak,
        ),
    ],
    ids=["one", "all"],
)
def test_the_quick_playbooks_run(state_dir: Path, tmp_path: Path, which: list[str], names: set[str]) -> None:
    argv = ["chaos", "run", *which, "--lab", "-o", "json", "--out", str(tmp_path / "runs")]
    argv += ["--junit", str(tmp_path / "junit.xml"), "--html", str(tmp_path / "report.html")]
    done = subprocess.run(
        [sys.executable, "-m", "ftctl", *argv], stdout=subprocess.PIPE, text=True, timeout=560, check=False
    )
    assert done.returncode in (0, 1)
    runs = {run["name"]: run for run in json.loads(done.stdout)["runs"]}
    assert names <= runs.keys()
    for name, run in runs.items():
        assert run["verdict"] in ("passed", "missed"), (name, run["verdict"], run["reason"])
        for objective in run["objectives"]:
            measure = objective["objective"].split()[0]
            assert objective["met"] or measure in OF_A_STOPWATCH, (name, objective)
            assert objective["measured"] is not None or measure in OF_A_STOPWATCH, (name, objective)
    assert (tmp_path / "junit.xml").exists()
    assert list_labs() == []
