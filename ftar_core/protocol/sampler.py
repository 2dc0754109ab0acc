"""Which replica trains which global batch: every batch exactly once in the committed history, whatever fails.

The whole memory is the `Deal`, which travels in Commit, NewEpoch, Join and in the record, so that any survivor can go
on dealing. A deal is fixed at the boundary before its step and never changed by retries: a batch whose contributor
was lost before the commit stays in the deal, unused, and goes back at the commit. Returned batches are dealt before
new ones, first in, first out (by step, then by slot), so that none waits for ever.

Rejected: dealing by (step, slot) arithmetic without memory. It needs no state, but a batch lost with its replica would
be skipped, or a replica that comes back would train one twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ftar_core.wire.messages import Deal


def first(contributors: Sequence[str]) -> Deal:
    """The deal of step 1. `contributors` by slot."""
    return _deal((), 0, contributors)


def following(deal: Deal, committed: Iterable[str], contributors: Sequence[str]) -> Deal:
    """The deal of the next step, when the step of `deal` was committed with the gradients of `committed`.

    `contributors` of the next step by slot. The entries of a deal are in slot order.
    """
    used = set(committed)
    lost = tuple(batch for replica, batch in deal.batches.items() if replica not in used)
    return _deal(deal.returned + lost, deal.cursor, contributors)


def again(deal: Deal, contributors: Sequence[str]) -> Deal:
    """A new deal of the same step, for when nobody who was dealt a batch is left: no gradient of the old one exists."""
    return _deal(deal.returned + tuple(deal.batches.values()), deal.cursor, contributors)


def _deal(waiting: tuple[int, ...], cursor: int, contributors: Sequence[str]) -> Deal:
    batches: dict[str, int] = {}
    taken = min(len(waiting), len(contributors))
    for replica, batch in zip(contributors, waiting, strict=False):
        batches[replica] = batch
    for replica in contributors[taken:]:
        batches[replica] = cursor
        cursor += 1
    return Deal(batches=batches, cursor=cursor, returned=waiting[taken:])
