"""A benchmark as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ftar_core.bench", *args], capture_output=True, text=True, timeout=250, check=False
    )


def rows_of(name: str, *args: str) -> list[dict[str, Any]]:
    """What it measured."""
    done = bench(name, *args, "-o", "json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["schema"], report["bench"]) == (1, name)
    rows: list[dict[str, Any]] = report["rows"]
    return rows
