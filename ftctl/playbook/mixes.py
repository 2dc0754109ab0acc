"""Ready mixes of faults for a storm, by name: mixes.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ftctl.yamlfile import read_tree

FILE = Path(__file__).with_name("mixes.yaml")


@cache
def _mixes() -> dict[str, dict[str, Any]]:
    tree = read_tree(FILE, max_bytes=64 * 1024, what="list of mixes", aliases=False)
    return dict(tree["mixes"])


def names() -> list[str]:
    return list(_mixes())


def source(name: str) -> str:
    """Where the shares were published."""
    return " ".join(str(_mixes()[name]["source"]).split())


def expand(mix: Any) -> Any:
    """A name to its faults, as a playbook would have them; a list as it is. Raises ValueError."""
    if not isinstance(mix, str):
        return mix
    if mix not in _mixes():
        raise ValueError(f"there is no mix {mix[:64]!r} (there are: {', '.join(names())}); or give a list of faults")
    kept = ("inject", "target", "with", "duration")
    faults = _mixes()[mix]["faults"]
    return [{**{key: fault[key] for key in kept if key in fault}, "weight": fault["share"]} for fault in faults]
