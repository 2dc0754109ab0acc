"""How much host memory catching up may take, when nobody has said."""

from __future__ import annotations

from pathlib import Path

LEAST_BYTES = 256 * 1024 * 1024
SHADOW_SHARE, SOURCE_SHARE = 0.25, 0.0625  # of what is available now, of all ranks of the replica together
_CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def available_bytes(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process can have: of the machine, or less where its control group says so. 0 if nobody tells."""
    found: list[int] = []
    for line in _text(proc).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and rest.split():
            found.append(int(rest.split()[0]) * 1024)
    for limit, used in _CGROUPS:
        most, now = _text(cgroup / limit).strip(), _text(cgroup / used).strip()
        if most.isdigit() and now.isdigit():
            found.append(max(0, int(most) - int(now)))
    return min(found, default=0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def replay_buffer_bytes(given: int, available: int, ranks: int, share: float = SHADOW_SHARE) -> int:
    """The bound of one rank's queue of steps: as given, else a share of what is available."""
    return given or max(LEAST_BYTES, int(available * share / ranks))
