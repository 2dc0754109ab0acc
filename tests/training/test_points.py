"""Failures at every point of a step, with real processes: survivors keep the step, or the job stops with a reason."""

from __future__ import annotations

import os
import shutil

import pytest

from .conftest import Job
from .failures import Failure, run_failure

TOOLS = ("unshare", "nsenter", "ip", "nft")
needs_network = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS),
    reason="a network of its own needs root, iproute2, util-linux and nftables",
)
RANK_DIES_AT = (
    "forward",
    "backward,bucket=1",
    "bucket,bucket=1",
    "reduced",
    "done-sent",
    "commit-received",
    "update",
    "updated",
)
RANK_QUICK = {"bucket,bucket=1", "reduced", "update"}


def name_of(point: str) -> str:
    return point.partition(",")[0]


ONE_REPLICA = [
    Failure(f"a replica dies at {name_of(point)}", {"r1": f"{point},step=12"}, quick=point in RANK_QUICK)
    for point in RANK_DIES_AT
]
SEVERAL_REPLICAS = [
    *(
        Failure(f"two of four die at {name_of(p)}", dict.fromkeys(("r1", "r2"), f"{p},step=12"), replicas=4)
        for p in RANK_DIES_AT
    ),
    *(Failure(f"all but one die at {name_of(p)}", dict.fromkeys(("r0", "r2"), f"{p},step=12")) for p in RANK_DIES_AT),
    Failure("one dies before the commit and one behind it", {"r0": "reduced,step=12", "r1": "commit-received,step=12"}),
    Failure(
        "one more dies when the epoch without the first is entered", {"r1": "reduced,step=12", "r2": "epoch,step=12"}
    ),
    Failure("below the minimum the job holds", {"r1": "reduced,step=12"}, replicas=2, min_replicas=2),
    *(
        Failure(
            f"all die at {name_of(p)}",
            dict.fromkeys(("r0", "r1", "r2"), f"{p},step=12"),
            options=("--recovery-wait", "3s"),
            stops="every member has been restarted, so the state is gone",
        )
        for p in ("reduced", "commit-received", "updated")
    ),
]
JOINS = [
    Failure("a member dies while a join is prepared", {"r0": "join-prepare,step=5"}, killed=("r2",)),
    Failure("the joining one dies while its join is prepared", later={"r2": "join-prepare"}, killed=("r2",)),
    Failure("the joining one dies at its promotion", later={"r2": "promote"}, killed=("r2",)),
    Failure("the joining one dies in the first step that it contributes to", later={"r2": "reduced"}, killed=("r2",)),
    Failure("the joining one dies while it fetches", later={"r2": "fetch"}, killed=("r2",)),
    Failure("the joining one dies while it replays", later={"r2": "replay"}, killed=("r2",)),
    Failure("the source dies while it serves", {"r0": "serve,step=5"}, killed=("r2",), quick=True),
    Failure("the source and the one that catches up die", {"r0": "serve,step=5"}, {"r2": "fetch"}, killed=("r2",)),
    Failure("two catch up at once", killed=("r1", "r2")),
    Failure("two catch up at once and their source dies", {"r0": "serve,step=5"}, killed=("r2", "r3"), replicas=4),
]
AT_STEP_12 = {
    "before-send:commit": "before it sends a commit",
    "after-send:commit": "when one has the commit",
    "after-send:commit,skip=1": "when two have the commit",
    "heard:done": "when it has heard of one that is done",
    "heard:done,skip=1": "when it has heard of two that are done",
    "heard:done,skip=2": "when it has heard of all that they are done",
}
AT_A_LOSS = {
    "before-record:new-epoch": "before the record of a loss",
    "after-record:new-epoch": "behind the record of a loss",
    "before-send:new-epoch": "before it tells of a loss",
    "after-send:new-epoch": "when one was told of a loss",
    "before-record:commit-next": "before the record of a join",
    "after-record:commit-next": "behind the record of a join",
    "after-send:commit-next": "when one has the commit of a join",
    "after-send:commit-next,skip=1": "when two have the commit of a join",
    "before-send:catchup": "before a shadow hears of its sources",
    "after-send:catchup": "when a shadow has heard of its sources",
    "before-send:prepare": "before it has a join prepared",
    "after-send:prepare": "when one prepares a join",
    "heard:hello,skip=3": "when a replica comes back",
    "after-send:welcome,skip=3": "when it has welcomed a replica that comes back",
    "heard:progress,step=5": "when it hears how a shadow goes on",
    "heard:caught-up,step=5": "when it hears that a shadow has caught up",
    "heard:prepared,step=5": "when the first has prepared a join",
    "heard:prepared,step=5,skip=2": "when the last has prepared a join",
}
AT_THE_START = {
    "before-record:join": "before the first record",
    "after-record:join": "behind the first record",
    "after-send:join": "when one has begun",
    "after-send:join,skip=1": "when two have begun",
    "after-send:hold": "when it has told one to wait",
    "heard:hello": "when the first replica comes",
}
AT_A_DRAIN = {
    "heard:op-request": "when it is asked to drain",
    "before-record:commit-next": "before the record of a drain",
    "after-record:commit-next": "behind the record of a drain",
    "after-send:commit-next": "when one has the commit of a drain",
    "after-send:commit-next,skip=1": "when two have the commit of a drain",
}
AT_AN_EVICTION = {
    "before-send:evicted": "before it evicts",
    "after-send:evicted": "when it has evicted",
    "after-record:new-epoch": "behind the record of an eviction",
}
COORDINATOR = [
    *(
        Failure(f"the coordinator dies {when}", coordinator=f"{point},step=12", quick=point == "after-send:commit")
        for point, when in AT_STEP_12.items()
    ),
    *(
        Failure(
            f"the coordinator dies {when}",
            coordinator=point,
            killed=("r2",),
            quick=point == "after-record:new-epoch",
        )
        for point, when in AT_A_LOSS.items()
    ),
    *(Failure(f"the coordinator dies {when}", coordinator=point) for point, when in AT_THE_START.items()),
    *(
        Failure(f"the coordinator dies {when}", coordinator=point, request=("drain", "r1"))
        for point, when in AT_A_DRAIN.items()
    ),
    *(
        Failure(f"the coordinator dies {when}", coordinator=point, request=("evict", "r1"))
        for point, when in AT_AN_EVICTION.items()
    ),
    Failure(
        "a replica that has done its step and the coordinator that has heard it die",
        {"r0": "done-sent,step=12"},
        coordinator="heard:done,step=12,skip=2",
    ),
    Failure(
        "one that has the commit dies, and the coordinator that has told nobody else",
        {"r0": "commit-received,step=12"},
        coordinator="after-send:commit,step=12",
    ),
    Failure(
        "the coordinator dies behind the record of a loss, and one that it kept dies before it is back",
        {"r0": "reduced,step=12", "r1": "reduced,step=12,action=sleep,ms=500; done-sent,step=12"},
        coordinator="after-record:new-epoch,step=12",
        deaths=2,
    ),
]
SPARES = [
    *(
        Failure(f"a member with a spare dies at {name_of(p)}", {"r1": f"{p},step=60"}, replicas=4, spares=1)
        for p in ("reduced", "commit-received")
    ),
    Failure("the spare dies at its promotion", {"r1": "reduced,step=60", "r3": "promote"}, replicas=4, spares=1),
    *(
        Failure(
            f"the coordinator dies {when} with a spare at hand",
            {"r1": "reduced,step=60"},
            coordinator=f"{point},step=60",
            replicas=4,
            spares=1,
        )
        for point, when in {
            "after-record:new-epoch": "behind the record of a loss",
            "after-send:new-epoch": "when one was told of a loss",
            "before-record:commit-next": "before the record of a promotion",
            "after-record:commit-next": "behind the record of a promotion",
            "after-send:commit-next": "when one has the commit of a promotion",
        }.items()
    ),
]
FROZEN = [
    Failure(
        f"a replica freezes at {name_of(point)} and wakes up when it is out",
        {"r1": f"{point},step=12,action=stop"},
        options=("--suspect-after", "1s", "--evict-after", "2s", "--max-evictions", "0"),
    )
    for point in RANK_DIES_AT
]
RANKS = [
    Failure(f"rank {rank} of a replica dies at {name_of(p)}", {"r1": f"{p},step=12,rank={rank}"}, team=True)
    for rank in (0, 1)
    for p in RANK_DIES_AT
]
RAISED = [
    Failure(f"an exception at {name_of(p)}", {"r1": f"{p},step=12,action=raise"})
    for p in ("forward", "reduced", "commit-received", "update", "updated")
] + [Failure("an exception at an epoch", {"r1": "epoch,action=raise", "r2": "reduced,step=12"}, deaths=2)]
FAILURES = [*ONE_REPLICA, *SEVERAL_REPLICAS, *JOINS, *COORDINATOR, *SPARES, *FROZEN, *RAISED, *RANKS]


@needs_network
@pytest.mark.soak
@pytest.mark.parametrize("cut", [(0, 1), (1, 2), (0, 2)])
def test_two_that_do_not_reach_each_other_but_the_coordinator(job: Job, cut: tuple[int, int]) -> None:
    """One of them goes, the others make their steps meanwhile, and it comes back when the network is mended."""
    options = ("--max-evictions", "0")
    supervised = run_failure(job, Failure("cut", cut=cut, options=options))
    assert supervised.lives[f"r{3 - sum(cut)}"] == 1, "the one that everybody reached was left alone"
    assert "no working rail to" in (job.path / "coordinator.log").read_text()


@pytest.mark.parametrize(
    "failure", [pytest.param(f, id=f.name, marks=() if f.quick else pytest.mark.soak) for f in FAILURES]
)
def test_a_failure(job: Job, failure: Failure) -> None:
    run_failure(job, failure)
