"""Versions of what computes: replicas must agree on them, or equal gradients would not make equal bits."""

from __future__ import annotations

import sys
from functools import cache
from importlib import metadata


@cache
def software() -> dict[str, str]:
    """Package -> version, of ours and of torch (as it is loaded; where nothing has loaded it, as it is installed)."""
    found: dict[str, str] = {}
    for package in ("ftctl", "torch"):
        loaded = getattr(sys.modules.get(package), "__version__", None)
        try:
            found[package] = str(loaded) if package == "torch" and loaded else metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
