"""Transcripts that a person can review: commands to a simulated cluster, and everything that follows from each.

Run with `pytest tests/scenarios --rewrite` after an intended change, and read the difference.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from simulation.hand import Hand
from simulation.test_histories import DETECTION
from simulation.world import World

from ftar_core.protocol.config import JobConfig

HERE = Path(__file__).parent


class Scenario:
    """`cluster NAMES [min=N] [replicas=N] [steps=N]` first, then any of the methods below, one a line."""

    def __init__(self) -> None:
        self.hand: Hand | None = None
        self.read = 0

    def command(self, line: str) -> list[str]:
        word, *rest = line.split()
        options = {k: int(v) for k, v in (x.split("=") for x in rest if "=" in x)}
        names = [x for x in rest if "=" not in x]
        said = getattr(self, f"do_{word.replace('-', '_')}")(*names, **options)
        world = self.world
        new, self.read = world.history[self.read :], len(world.history)
        return [line[10:] for line in new] + (said or [])

    @property
    def world(self) -> World:
        assert self.hand is not None, "a scenario begins with `cluster`"
        return self.hand.world

    def do_cluster(self, *names: str, min: int = 1, replicas: int = 0, steps: int = 0) -> None:
        config = JobConfig(
            job="job",
            replicas=replicas or len(names),
            min_replicas=min,
            steps=steps,
            detection=DETECTION,
            recovery_wait_s=2,
            gather_s=0.5,
            hold_exit_s=60,
            record_check_s=1000,
        )
        self.hand = Hand(World(config, quiet=False))
        self.world.start_server()
        for name in names:
            self.world.start_life(name)
        self.rest()

    def rest(self) -> None:
        """Everything settles; nobody begins a step."""
        assert self.hand is not None
        self.hand.lazy = {x.name for x in self.world.lives}
        self.hand.pump()

    def do_steps(self, count: str) -> None:
        assert self.hand is not None
        goal = self.world.truth.last + int(count)
        self.hand.lazy = set()
        self.hand.pump(until=lambda: self.world.truth.last >= goal)
        self.rest()

    def do_compute(self, *names: str) -> None:
        """These produce their gradients of the running step."""
        assert self.hand is not None
        self.hand.lazy = {x.name for x in self.world.lives} - set(names)
        self.hand.pump()
        self.hand.lazy = {x.name for x in self.world.lives}

    def do_kill(self, *names: str) -> None:
        assert self.hand is not None
        self.hand.kill(*names)
        self.rest()

    def do_start(self, *names: str) -> None:
        for name in names:
            self.world.start_life(name)
        self.rest()

    def _operate(self, op: str, name: str, **options: int) -> list[str]:
        reply = self.world.server.operate(op, name, **{k: bool(v) for k, v in options.items()})
        self.rest()
        return [f"{reply.code}: {reply.text}"]

    def do_drain(self, name: str, **options: int) -> list[str]:
        return self._operate("drain", name, **options)

    def do_evict(self, name: str, **options: int) -> list[str]:
        return self._operate("evict", name, **options)

    def do_rejoin(self, name: str) -> list[str]:
        return self._operate("rejoin", name)

    def do_force_quorum(self) -> list[str]:
        return self._operate("force-quorum", "")

    def do_cut(self, *names: str) -> None:
        """These lose the coordinator, and cannot come back until `heal`."""
        assert self.hand is not None
        self.hand.unconnected |= set(names)
        self.hand.break_link(*names)
        self.rest()

    def do_heal(self) -> None:
        assert self.hand is not None
        self.hand.unconnected = set()
        self.rest()

    def do_restart(self) -> None:
        if any(s.alive for s in self.world.servers):
            self.world.server.crash("killed")
        self.world.start_server()
        self.rest()

    def do_crash(self) -> None:
        self.world.server.crash("killed")

    def do_lose_record(self) -> None:
        self.world.server.crash("killed")
        self.world.store.wipe()

    def do_disk(self, state: str) -> None:
        self.world.store.broken = state == "full"

    def do_wait(self, seconds: str) -> None:
        assert self.hand is not None
        self.hand.lazy = {x.name for x in self.world.lives}
        self.hand.advance(float(seconds))

    def do_status(self) -> list[str]:
        view = self.world.server.machine.view(self.world.now, 0.0)
        names = ",".join(view.contributors) or "none"
        head = f"{view.state}, step {view.step}, epoch {view.term}.{view.epoch}, contributors {names}"
        lines = [head + (f": {view.reason}" if view.reason else "")]
        return lines + [f"  {r.name}  {r.state:13} slot {r.slot}  {r.reason}" for r in view.replicas]


def play(text: str) -> str:
    """The transcript with the output of every `$` line made anew; comments stay."""
    scenario, out = Scenario(), []
    for line in text.splitlines():
        if line.startswith("$ "):
            out += [line, *(f"    {said}" for said in scenario.command(line[2:]))]
        elif not line.startswith("    "):
            out.append(line)
    return "\n".join(out) + "\n"


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_the_cluster_does_what_the_transcript_says(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    played = play(text)
    if request.config.getoption("rewrite", False):
        path.write_text(played)
    assert played == path.read_text()
