"""What lies where under the agent's state directory; agent and watchdog must agree."""

from __future__ import annotations

from pathlib import Path


def ledger_directory(state_dir: Path) -> Path:
    return state_dir / "ledger"


def scratch_directory(state_dir: Path) -> Path:
    return state_dir / "scratch"
