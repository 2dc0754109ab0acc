"""Which replica trains which global batch: every batch exactly once in the committed history, whatever fails.

The whole memory is the `Deal`, which travels in Commit, NewEpoch, Join and in the record, so that any survivor can go
on dealing. A deal is fixed at the boundary before its step and never changed by retries: a batch whose contributor
was lost before the commit stays in the deal, unused, and goes back at the commit. Returned batches are dealt before
new ones, first in, first out (by step, then by slot), so that none waits for ever. Where the data has an end, the last
steps may have contributors without a batch; the job ends with the commit of the last batch.

Where an update is of a fixed number of batches (`round`), a step deals no more than the update still lacks; whose turn
it is to go without moves on with the cursor.

Rejected: dealing by (step, slot) arithmetic without memory. It needs no state, but a batch lost with its replica would
be skipped, or a replica that comes back would train one twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ftar_core.wire.messages import Deal

NOTHING_DEALT = Deal(batches={}, cursor=0)


def first(contributors: Sequence[str], start: Deal | None = None) -> Deal:
    """The deal of step 1. `contributors` by slot. `start` (of a checkpoint, and with the limit): what is not to be
    dealt any more, because an earlier job has trained it."""
    start = NOTHING_DEALT if start is None else start
    return _deal(start, start.returned, contributors, start.left or start.round)


def following(deal: Deal, committed: Iterable[str], contributors: Sequence[str]) -> Deal:
    """The deal of the next step, when the step of `deal` was committed with the gradients of `committed`.

    `contributors` of the next step by slot. The entries of a deal are in slot order.
    """
    used = set(committed)
    lost = tuple(batch for replica, batch in deal.batches.items() if replica not in used)
    left = deal.left - (len(deal.batches) - len(lost))
    if left <= 0 or exhausted(deal, used):
        left = deal.round
    return _deal(deal, deal.returned + lost, contributors, left)


def exhausted(deal: Deal, committed: Iterable[str]) -> bool:
    """All batches are trained when the step of `deal` is committed with the gradients of `committed`."""
    if not deal.limit or deal.cursor < deal.limit or deal.returned:
        return False
    used = set(committed)
    return all(replica in used for replica in deal.batches)


def again(deal: Deal, contributors: Sequence[str]) -> Deal:
    """A new deal of the same step, for when nobody who was dealt a batch is left: no gradient of the old one exists."""
    return _deal(deal, deal.returned + tuple(deal.batches.values()), contributors, deal.left)


def _deal(before: Deal, waiting: tuple[int, ...], contributors: Sequence[str], left: int) -> Deal:
    if before.round and left < len(contributors):
        turn = before.cursor % len(contributors)
        chosen = {contributors[(turn + place) % len(contributors)] for place in range(left)}
        contributors = [name for name in contributors if name in chosen]
    batches: dict[str, int] = {}
    cursor, limit = before.cursor, before.limit
    taken = min(len(waiting), len(contributors))
    for replica, batch in zip(contributors, waiting, strict=False):
        batches[replica] = batch
    for replica in contributors[taken:]:
        if limit and cursor >= limit:
            break  # this one and those behind it have weight 0
        batches[replica] = cursor
        cursor += 1
    return msgspec.structs.replace(before, batches=batches, cursor=cursor, returned=waiting[taken:], left=left)
