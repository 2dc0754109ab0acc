"""The cluster under random faults: `pytest tests/simulation --seeds N [--first-seed S]`; a failure prints its history.

One seed by hand: `pytest tests/simulation -k seeds --first-seed 811 --seeds 1`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from .chaos import EVERY, Outcome, run
from .conftest import DEFAULT_SEEDS
from .cores import on_all_cores

PARTS = 20
# Seeds beyond the default ones that have found a fault; numbers mean what they did as long as no event is drawn anew.
FOUND = (  # seed, steps between two checkpoints
    # A job that began again from a checkpoint did not tell of results that differed at a step told of before.
    (8947, EVERY),
    # A job that went on with a shadow's state left another one with the state after a step that came again.
    (103080, EVERY),
    # All contributors die, and a spare that is a few steps behind is what the job goes on with.
    (2297, (1, 3)),
)


def run_with_an_end(seed: int) -> Outcome:
    return run(seed, limit=5 + seed % 90)


def run_with_checkpoints(seed: int) -> Outcome:
    return run(seed, every=(1, 2, 4))


@pytest.mark.parametrize("part", range(PARTS))
def test_a_cluster_under_random_faults_keeps_one_truth(part: int, request: pytest.FixtureRequest) -> None:
    seeds = request.config.getoption("seeds", DEFAULT_SEEDS)
    first = request.config.getoption("first_seed", 0)
    outcomes = on_all_cores(run, range(first + part, first + seeds, PARTS))
    if len(outcomes) >= 20:
        went_on = [o for o in outcomes if o.ended == "progress"]
        assert len(went_on) > 0.75 * len(outcomes), "most runs must survive their faults, not merely explain them"
        assert sum(o.faults for o in outcomes) > len(outcomes), "the runs had hardly any faults"
        assert sum(o.steps for o in outcomes) > 5 * len(outcomes), "the runs committed hardly anything"


@pytest.mark.parametrize(("seed", "every"), FOUND)
def test_what_was_found_once(seed: int, every: Sequence[int]) -> None:
    assert run(seed, every=every).ended == "progress"


@pytest.mark.parametrize("part", range(PARTS))
def test_data_that_has_an_end_is_trained_to_its_end(part: int, request: pytest.FixtureRequest) -> None:
    """Every batch once, none beyond the last, and no step without data (truth.py sees to the latter)."""
    seeds = request.config.getoption("seeds", DEFAULT_SEEDS) // 5
    first = request.config.getoption("first_seed", 0)
    outcomes = on_all_cores(run_with_an_end, range(first + part, first + seeds, PARTS))
    if len(outcomes) >= 10:
        trained = [o for o in outcomes if o.ended == "all trained"]
        # The others stopped because all who held the state were killed, which is the right end for them.
        assert len(trained) > 0.5 * len(outcomes), [o.ended for o in outcomes]


def test_a_job_whose_replicas_all_die_goes_on_from_a_checkpoint(request: pytest.FixtureRequest) -> None:
    """Only if nobody who holds more is here, with nobody who had a part in what is lost, and with every batch of what
    counts trained once (truth.py)."""
    seeds = request.config.getoption("seeds", DEFAULT_SEEDS) // 10
    first = request.config.getoption("first_seed", 0)
    outcomes = on_all_cores(run_with_checkpoints, range(first, first + seeds))
    if len(outcomes) >= 40:
        assert sum(o.rewound for o in outcomes) > 0.03 * len(outcomes), "hardly anything began again"
