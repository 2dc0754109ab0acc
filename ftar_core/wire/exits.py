"""Exit codes of a rank process: what a supervisor (an agent, torchrun, Slurm) should do next."""

from __future__ import annotations

from enum import IntEnum


class RankExit(IntEnum):
    FINISHED = 0  # the job committed its last step
    USAGE = 2  # settings are wrong: starting again will not help
    RESTART = 75  # EX_TEMPFAIL: evicted, lost the coordinator, lost its state: start again
    DRAINED = 76  # left at a step boundary on request: start again only after `ftctl rejoin replica`
    FAILED = 70  # EX_SOFTWARE: the job has failed, on all replicas at the same step: starting again will not help
    REFUSED = 77  # EX_NOPERM: the job refuses this replica (other model, wrong token): starting again will not help
