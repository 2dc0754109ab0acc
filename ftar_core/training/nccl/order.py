"""In which order gradient buckets go to NCCL: by number, on all members alike.

Backward fills buckets in an order of its own on every member (a parameter may be unused here, two devices race there).
Our ring takes them as they come; NCCL matches operations by their position alone, so a difference would add up the
wrong buckets or wait for ever. So a bucket waits here for those before it. Nothing is lost by that at the end of a
step, and little before: the plan numbers buckets in the order in which backward usually fills them.

Pure: no thread, no clock.
"""

from __future__ import annotations


class Order:
    def __init__(self, buckets: int) -> None:
        """`buckets`: how many a step has, numbered from 0."""
        self._buckets = buckets
        self._step = -1
        self._next = 0
        self._waiting: set[int] = set()

    def offer(self, step: int, bucket: int) -> None:
        """This bucket may go. Raises ValueError if the step has none of this number, or had it already."""
        if step != self._step:
            self._step, self._next = step, 0
            self._waiting.clear()
        if not 0 <= bucket < self._buckets or bucket < self._next or bucket in self._waiting:
            raise ValueError(f"bucket {bucket} of step {step}: not one of {self._buckets}, or offered twice")
        self._waiting.add(bucket)

    def take(self) -> tuple[int, int] | None:
        """(step, bucket) of the next one; None: it is not there yet."""
        if self._next not in self._waiting:
            return None
        self._waiting.discard(self._next)
        self._next += 1
        return self._step, self._next - 1

    @property
    def ready(self) -> bool:
        """`take` would give one."""
        return self._next in self._waiting
