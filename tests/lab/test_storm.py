"""The storm of storm.py, as `make soak` runs it: SOAK_SECONDS (20 minutes) for both jobs together, SOAK_SEED."""

from __future__ import annotations

import os
import random
import shutil

import pytest

from .conftest import needs_namespaces
from .storm import WEIGHTS, Settings, Storm, plan

SECONDS = float(os.environ.get("SOAK_SECONDS", "1200"))
SHARE = {2: 0.75, 1: 0.25}  # of the time, by ranks a replica
needs_nft = pytest.mark.skipif(shutil.which("nft") is None, reason="nftables is missing: no packets to drop")


def test_one_seed_is_one_plan_with_every_kind_of_blow() -> None:
    assert plan(5, 300, 2) == plan(5, 300, 2)
    assert plan(5, 300, 2) != plan(6, 300, 2)
    blows = plan(5, 300, 2)
    assert {blow.kind for blow in blows} == set(WEIGHTS)
    assert {(blow.replica, blow.rank, blow.rail) for blow in blows} == {
        (replica, rank, rail) for replica in range(3) for rank in range(2) for rail in range(2)
    }
    assert all(hasattr(Storm, blow.kind.replace("-", "_")) for blow in blows)


@needs_namespaces
@needs_nft
@pytest.mark.soak
@pytest.mark.timeout(int(SECONDS) + 1200)
@pytest.mark.parametrize("ranks", [2, 1])
def test_a_storm_ends_with_the_same_bits_and_every_batch_trained_once(
    ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(1_000_000)))
    settings = Settings(seed=seed, seconds=SECONDS * SHARE[ranks], ranks=ranks)
    with capsys.disabled():
        storm = Storm(settings)
        print(f"\n{storm.again()}", flush=True)
        result = storm.run()
        print(f"storm with seed {seed}, {ranks} ranks a replica:\n{result}", flush=True)
    assert result.steps > 0
