"""A leader hands a commit on without reading all of it: what its ranks get is what it was told."""

from __future__ import annotations

import msgspec
import pytest

from ftar_core.errors import WireError
from ftar_core.protocol.effects import ApplyCommit, EnterEpoch
from ftar_core.protocol.events import Challenged, Received, StepReduced
from ftar_core.protocol.member import Member
from ftar_core.wire.codec import FrameParser, encode, from_coordinator, to_leader_of_several
from ftar_core.wire.ids import NO_EPOCH, EpochId, Term
from ftar_core.wire.messages import (
    Commit,
    Deal,
    EpochInfo,
    MemberInfo,
    NewEpoch,
    RelayedCommit,
    Verdict,
    Welcome,
)
from ftar_core.wire.team import CommitOrder, RelayOrder

TERM = Term(3, "abc")
EPOCH = EpochInfo(
    id=EpochId(TERM, 1), members=tuple(MemberInfo(replica=f"r{i}", incarnation=i, slot=i, ranks=()) for i in range(3))
)
LATER = EpochInfo(id=EpochId(TERM, 2), members=EPOCH.members[:2])
DEAL = Deal(batches={"r0": 7, "r1": 1 << 40, "r2": 9}, cursor=10, returned=(4, 5), limit=1 << 50, round=6, left=3)
COMMITS = [
    Commit(term=TERM, step=5, epoch=EPOCH.id, contributors=("r0", "r1", "r2"), verdict=Verdict.APPLY, deal=DEAL),
    Commit(
        term=TERM,
        step=5,
        epoch=EPOCH.id,
        contributors=(),
        verdict=Verdict.SKIP,
        deal=Deal(batches={}, cursor=0),
        next=LATER,
        drained=("r2",),
        last=True,
        checkpoint=True,
    ),
]


def relayed(commit: Commit) -> RelayedCommit:
    (found,) = FrameParser(to_leader_of_several).feed(encode(commit))
    assert isinstance(found, RelayedCommit)
    return found


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("loss", [None, 0.25])
def test_ranks_get_byte_for_byte_what_they_would_get_from_a_leader_that_had_read_it(
    commit: Commit, loss: float | None
) -> None:
    assert encode(RelayOrder(commit=relayed(commit), loss=loss)) == encode(CommitOrder(commit=commit, loss=loss))
    assert relayed(commit).whole() == commit
    assert commit.whole() is commit


def test_it_has_the_same_fields_as_a_commit() -> None:
    """One that is added to the one must be to the other, or leaders refuse it."""
    fields = [[(f.encode_name, f.default) for f in msgspec.structs.fields(kind)] for kind in (Commit, RelayedCommit)]
    assert fields[0] == fields[1]


@pytest.mark.parametrize("commit", [COMMITS[0], msgspec.structs.replace(COMMITS[1], last=False, drained=())])
def test_a_member_does_with_it_what_it_does_with_the_whole(commit: Commit) -> None:
    """And knows the deal when it has to say it."""
    found = []
    for told in (commit, relayed(commit)):
        member = Member("demo", "r0", 0.0, 600.0, "digest")
        member.handle(Challenged(TERM), 0.0)
        member.handle(Received(Welcome(term=TERM, incarnation=0, proof=b"")), 0.0)
        member.step = 5
        start = NewEpoch(term=TERM, epoch=EPOCH, step=5, deal=DEAL, lost={}, last_commit_epoch=NO_EPOCH)
        member.handle(Received(start), 1.0)
        member.handle(StepReduced(step=5, epoch=EPOCH.id, digest=1, finite=True), 2.0)
        effects = member.handle(Received(told), 3.0)
        assert isinstance(effects[0], ApplyCommit)
        assert effects[0].commit is told
        found.append(([e for e in effects if isinstance(e, EnterEpoch)], member.report(), member.step))
    assert found[0] == found[1]
    assert found[0][1].deal == commit.deal


@pytest.mark.parametrize("field", ["contributors", "deal"])
def test_what_is_no_commit_is_said_when_it_is_read(field: str) -> None:
    wrong = msgspec.msgpack.decode(msgspec.msgpack.encode(COMMITS[0]))
    wrong[field] = {"batches": 3}
    body = msgspec.msgpack.encode(wrong)
    with pytest.raises(WireError, match="not a message"):
        FrameParser(from_coordinator).feed(len(body).to_bytes(4, "little") + body)
    (found,) = FrameParser(to_leader_of_several).feed(len(body).to_bytes(4, "little") + body)
    assert isinstance(found, RelayedCommit)
    with pytest.raises(WireError, match="not a commit of this protocol"):
        found.whole()
