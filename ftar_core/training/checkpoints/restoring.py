"""The state of a job that nobody holds any more: the newest checkpoint that all ranks of the replica can read.

Every rank proposes the newest one that it can load, and has it in host memory, verified, when it says so; the lowest
proposal is the next upper bound, until all propose the same. So a rank whose file is damaged takes all of them back to
the checkpoint before, and none of them loads anything that another one cannot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from ftar_core.errors import CheckpointError
from ftar_core.runtime.breakpoints import passes
from ftar_core.training.checkpoints import tree
from ftar_core.training.checkpoints.histories import following
from ftar_core.training.checkpoints.layout import Found, complete_name, mark_damaged, survey
from ftar_core.training.checkpoints.options import Checkpoint
from ftar_core.training.checkpoints.reading import Damaged, Loaded, load
from ftar_core.training.journal import Journal
from ftar_core.training.state import Stateful
from ftar_core.wire.team import Ballot

log = logging.getLogger("ftar.checkpoint")


class Restorer:
    def __init__(
        self, options: Checkpoint, *, parts: Mapping[str, Stateful], names: tree.Names, journal: Journal
    ) -> None:
        self._options, self._parts, self._names, self._journal = options, parts, names, journal
        self.history = 1  # of a job that begins with what was found

    def run(self, agree: Callable[[Ballot], tuple[Ballot, ...]]) -> int | None:
        """The step whose state is live now; 0: there is no checkpoint; None: the replica ends. Raises CheckpointError,
        StateMismatch where going on without asking would be wrong."""
        began = time.monotonic()
        if not self._options.restore:
            self._nothing_there()
        self.history = following(self._options.path, self._survey())
        bound: int | None = None
        while True:
            loaded = self._newest(bound)
            mine = loaded.step if loaded is not None else 0
            ballots = agree(Ballot(mine, restores=True))
            if not ballots:
                return None
            steps = {ballot.step for ballot in ballots}
            if len(steps) == 1:
                break
            bound = min(steps)
            log.warning(
                "the ranks of this replica can load the checkpoints of steps %s: all take the lowest", sorted(steps)
            )
        if loaded is None:
            log.info("no checkpoint in %s: the job begins anew", self._options.path)
            return 0
        loaded.into(self._parts)
        log.warning("restored the state after step %d from %s in %.2f s", mine, loaded.path, time.monotonic() - began)
        self._journal.write("restored", {"step": mine, "path": str(loaded.path), "seconds": time.monotonic() - began})
        return mine

    def _nothing_there(self) -> None:
        found = self._survey()
        if found:
            raise CheckpointError(
                f"{self._options.path} holds checkpoints up to step {found[-1].step}, and the job is to begin anew",
                hint="give it an empty directory, or restore=True",
            )

    def _survey(self) -> list[Found]:
        try:
            return survey(self._options.path)
        except OSError as error:
            raise CheckpointError(f"checkpoint directory {self._options.path}: {error.strerror}") from None

    def _newest(self, bound: int | None) -> Loaded | None:
        """The newest one up to `bound` that is complete and whose bytes are right."""
        passed = ""
        for found in reversed(self._survey()):
            step = found.step
            if bound is not None and step > bound:
                continue
            if found.refused is not None:
                raise found.refused
            problem = found.problem
            if found.manifest is not None:
                passes("checkpoint-load", step)
                try:
                    return load(found.path, found.manifest, self._parts, self._names)
                except Damaged as error:
                    problem = str(error)
                    mark_damaged(found.path, problem)
            log.warning("checkpoint %s is passed by: %s", complete_name(step), problem)
            self._journal.write("checkpoint-damaged", {"step": step, "reason": problem})
            passed = f"{complete_name(step)}: {problem}"
        if passed:
            raise CheckpointError(
                f"none of the checkpoints in {self._options.path} can be loaded; the oldest is {passed}",
                hint="move them away, and the job begins anew",
            )
        return None
