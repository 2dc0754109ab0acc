"""Seeds on all cores at once: a run is pure, so that where it runs changes nothing but how long it takes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
CHUNK = 5


@lru_cache(maxsize=1)
def _pool() -> ProcessPoolExecutor:
    """Forked, so that every process has the world imported. It ends with the interpreter."""
    return ProcessPoolExecutor(os.cpu_count() or 1, multiprocessing.get_context("fork"))


def on_all_cores(run: Callable[[int], T], seeds: Iterable[int]) -> list[T]:
    """`run` is a function of a module. The first error is raised, with the history that its text tells."""
    return list(_pool().map(run, seeds, chunksize=CHUNK))
