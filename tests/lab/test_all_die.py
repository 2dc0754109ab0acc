"""The day all replicas die, in a lab: what `ftctl` shows of the checkpoints before, and what the job has lost after."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from .conftest import eventually, needs_namespaces
from .test_whole_job import REPLICAS, User, metrics, samples, spent, with_a_lab

pytestmark = [needs_namespaces, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture
def user() -> Iterator[User]:
    yield from with_a_lab("--step-ms", "100", "--checkpoint-every", "20")


def test_all_replicas_and_the_coordinator_die_and_at_most_the_steps_since_are_lost(user: User) -> None:
    eventually(lambda: (user.sees()["job"]["checkpoint"] or {"step": 0})["step"] >= 20, "no checkpoint")
    eventually(lambda: 'ftar_checkpoint_step{job="lab"} ' in metrics(user), "the agents do not say so")
    status = user.sees()
    ranks = json.loads(user.does("ranks", "-o", "json"))["ranks"]
    for rank in ranks:
        os.kill(rank["process"]["pid"], signal.SIGKILL)
    os.kill(status["job"]["coordinator"]["pid"], signal.SIGKILL)
    eventually(lambda: user.sees()["job"]["coordinator"] is not None, "no coordinator comes back")
    kept = user.sees()["job"]["checkpoint"]
    assert kept is not None, "the next coordinator knows what there is to go on from"
    assert kept["step"] >= 20
    eventually(lambda: user.sees()["job"]["contributors"] == REPLICAS, "the job does not go on", 240)
    restored = [e for e in json.loads(user.does("events", "-o", "json"))["events"] if e["kind"] == "replica.restored"]
    assert restored
    newest = max(int(path.name.removeprefix("step-")) for path in user.paths.checkpoints.glob("step-*"))
    begun = int(restored[0]["reason"].partition("after step ")[2].partition(" ")[0])
    assert status["job"]["checkpoint"]["step"] <= begun <= newest
    again = spent(user).get(("recomputed", "restart"), {"count": 0})["count"]
    assert again <= 21 + 1, "no more than the steps since"
    before = kept["step"]
    eventually(lambda: user.sees()["job"]["checkpoint"]["step"] > before, "no checkpoint after it")
    assert samples(user, "ftar_checkpoint_failures_total") == [0]
