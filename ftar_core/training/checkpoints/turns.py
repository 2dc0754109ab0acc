"""Who writes a checkpoint: decided alike by all replicas from what they all know. Pure.

In data parallel every replica holds the state already, so a copy in peers' memory is there at the end of each step;
what it lacks is to stand still. Therefore every replica keeps a snapshot of its own until the checkpoint is on disk.
One of them writes, another one each time; when it is lost, or nothing is written for too long, the next in the same
order does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Life = tuple[str, int]  # replica, incarnation


@dataclass(frozen=True)
class Order:
    """Of one checkpoint: the contributors of its step, beginning with the one whose turn it is."""

    step: int
    lives: tuple[Life, ...]


def order_of(step: int, every: int, contributors: Sequence[str], lives: Mapping[str, int]) -> Order:
    """`every`: steps between checkpoints, 0 where they are made by time. `lives`: incarnation of each replica that is
    in the job behind this step; whoever left with it has nothing to write any more."""
    turn = step // every if every else step
    ring = [contributors[(turn + place) % len(contributors)] for place in range(len(contributors))]
    return Order(step, tuple((name, lives[name]) for name in ring if name in lives))


def is_mine(
    order: Order,
    me: Life,
    here: Mapping[str, int],
    idle_s: float,
    takeover_s: float,
    *,
    out: Callable[[Life], bool] = lambda _: False,
) -> bool:
    """Is it now this life's to write? `here`: who is in the job now. `idle_s`: for so long nothing of it was written;
    each `takeover_s` passes it on by one. `out`: who has said that it does not write this one; asked of as few as
    possible."""
    if me not in order.lives:
        return False
    left = int(idle_s / takeover_s)
    for life in order.lives[: order.lives.index(me)]:
        if here.get(life[0]) == life[1] and not out(life):
            left -= 1
            if left < 0:
                return False
    return True
