"""Figures that tests of a GPU measure: by name, in one JSON file (FTAR_GPU_FIGURES; run.sh shows it)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch


def note(name: str, **figures: float | int | str | dict[str, float]) -> None:
    if path := os.environ.get("FTAR_GPU_FIGURES"):
        file = Path(path)
        known = json.loads(file.read_text()) if file.exists() else {}
        known["device"] = torch.cuda.get_device_name()
        known[name] = figures
        file.write_text(json.dumps(known, indent=1))
