"""The coordinator's durable record, and the claim of a term.

Written and fsynced before an epoch is sent to anybody. What it holds and why: ARCHITECTURE.md, "Recovery"; each field
closes a history in which two truths would be committed (rules REC, START, CLAIM, FENCE, ASSIGN).
"""

from __future__ import annotations

import msgspec

from ftar_core.wire.ids import EpochId, Term
from ftar_core.wire.messages import Deal, EpochInfo

FORMAT = 1


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job: str
    term: Term  # who wrote it
    epoch: EpochInfo  # members with incarnations, slots and endpoints
    first_step: int  # the first step of the epoch
    deal: Deal  # dealt at first_step
    last_commit_epoch: EpochId  # the epoch that committed first_step - 1
    next_incarnation: int
    slots: dict[str, int]  # the slot each replica had last: it gets it back when it is free
    cordoned: tuple[str, ...] = ()  # replicas that must not join until `rejoin`
    ended: bool = False  # the last commit was sent
    format: int = FORMAT


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The store as a starting coordinator finds it, after its own term was claimed and fsynced."""

    term: Term  # ours, higher than every term the store has seen
    record: Record | None  # None: lost, or a new job (`fresh` tells which)
    fresh: bool  # the store was empty when claimed and the operator started a new job
