"""How many file descriptors a process may have: raised as far as it goes, refused clearly where that is not enough."""

from __future__ import annotations

import resource

from ftar_core.bench.report import BenchError

SPARE = 256  # for what a process has open besides


def raise_descriptors(needed: int) -> None:
    """Raises BenchError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + SPARE
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise BenchError(
            f"{wanted} file descriptors a process are needed, the hard limit is {hard}",
            hint=f"raise it (as root: ulimit -Hn {wanted}), or measure a smaller --shape",
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
