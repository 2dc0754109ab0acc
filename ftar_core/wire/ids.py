"""Names and numbers with an order: replicas, terms, epochs."""

from __future__ import annotations

import hashlib
import re

import msgspec

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?\Z")


def valid_name(name: str) -> bool:
    """True for a job, replica, node or rail name: 1 to 63 of [a-z0-9._-], beginning and ending in a letter or digit."""
    return _NAME.match(name) is not None


class Term(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One life of a coordinator. Ordered by number, then id: two stores can never mint the same term (rule UNIQ)."""

    number: int
    coordinator: str

    def __str__(self) -> str:
        return f"{self.number}"


class EpochId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """An epoch of membership, ordered by (term, number). Numbers rise within a term and are never used twice."""

    term: Term
    number: int

    def __str__(self) -> str:
        return f"{self.term.number}.{self.number}"


NO_TERM = Term(0, "")
NO_EPOCH = EpochId(NO_TERM, 0)


def epoch_key(job: str, epoch: EpochId, rank: int = 0) -> bytes:
    """The 16 bytes by which data links name an epoch of ring `rank`: equal on both ends only for the same job, term,
    epoch and rank."""
    text = f"{job}\0{epoch.term.number}\0{epoch.term.coordinator}\0{epoch.number}"
    if rank:
        text += f"\0{rank}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
