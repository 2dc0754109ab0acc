"""Replicas compare their snapshots before one of them is written, so that no corrupted state becomes the job's.

Behind a commit all replicas hold the same bytes. The check of every step looks at a slice of the state only, so that
for one rotation nobody may know yet that a replica's is not the others'; but whoever writes, writes all of it. Each
rank therefore leaves the digest of its snapshot in a directory beside the one that is written:

    .step-000000500.2.votes/r1.7.0     of rank 0 of incarnation 7 of r1, in history 2; empty: it has no snapshot
    .step-000000500.2.votes/r1.7.out   r1 does not write this one: a rank of it has no snapshot, or its own is not what
                                       most have; the next in the order does
    .step-000000500.2.votes/unclear    nobody writes this one: they differ, and nobody can say whose is right

Rank i of all replicas holds the same shard, so each rank's digests are a vote of their own. Three or more can tell who
is odd, two only that one of them is. Who waits for votes waits `PATIENCE_S` at most: a replica that cannot say anything
keeps nobody from writing.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftar_core.protocol.majority import outvoted
from ftar_core.training.checkpoints.turns import Life

PATIENCE_S = 5.0
MISSED = ""
OUT, UNCLEAR = "out", "unclear"
MOST_BYTES = 200
_VOTES = re.compile(r"\.step-(\d{9,18})\.(\d+)\.votes\Z")


@dataclass(frozen=True)
class Verdict:
    """`odd`: whose snapshot is not what most have. Where `clear` is false nobody can say whose is right, and `odd` are
    all that differ."""

    odd: frozenset[Life]
    clear: bool


def judge(votes: Mapping[Life, Sequence[str]]) -> Verdict:
    """`votes`: of each life the digest of each rank; MISSED where a rank has none."""
    odd: set[Life] = set()
    clear = True
    for rank in range(max((len(digests) for digests in votes.values()), default=0)):
        differ, sure = outvoted(
            {life: digests[rank] for life, digests in votes.items() if rank < len(digests) and digests[rank]}
        )
        clear = clear and sure
        odd.update(differ)
    return Verdict(frozenset(odd), clear)


class Box:
    """The votes about one checkpoint. All but the ballots themselves may be gone at any time: then there is nothing to
    vote about any more."""

    def __init__(self, directory: Path, step: int, history: int) -> None:
        self.path = directory / f".step-{step:09d}.{history}.votes"

    def cast(self, life: Life, rank: int, digest: str) -> None:
        """Raises OSError."""
        self._put(f"{life[0]}.{life[1]}.{rank}", digest)

    def step_out(self, life: Life) -> None:
        """Raises OSError."""
        self._put(f"{life[0]}.{life[1]}.{OUT}", "")

    def is_out(self, life: Life) -> bool:
        return (self.path / f"{life[0]}.{life[1]}.{OUT}").exists()

    def give_up(self) -> None:
        """Raises OSError."""
        self._put(UNCLEAR, "")

    @property
    def given_up(self) -> bool:
        return (self.path / UNCLEAR).exists()

    def of(self, life: Life, ranks: int) -> list[str] | None:
        """Of all its ranks; None as long as one of them has not voted."""
        found: list[str] = []
        for rank in range(ranks):
            try:
                with (self.path / f"{life[0]}.{life[1]}.{rank}").open("rb") as file:
                    found.append(file.read(MOST_BYTES).decode("ascii", "replace"))
            except OSError:
                return None
        return found

    def _put(self, name: str, text: str) -> None:
        self.path.mkdir(exist_ok=True)
        temporary = self.path / f".{name}"
        temporary.write_text(text)
        temporary.replace(self.path / name)


def forget(directory: Path, names: Sequence[str], history: int, step: int) -> None:
    """Boxes about what has been written, or never will be. Never raises."""
    for name in names:
        found = _VOTES.match(name)
        if found and (int(found[2]), int(found[1])) <= (history, step):
            with contextlib.suppress(OSError):
                shutil.rmtree(directory / name)
