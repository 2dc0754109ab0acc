"""The supervisor of one system, and what befalls its replicas: started, hit, restarted, all alike.

A process that has ended is started again at once. One that is frozen or cut off is only ended and started again when
the others have committed a step without it: finding that out is the system's own business.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftar_core.bench.peers.forks import Forks
from ftar_core.bench.peers.place import Place
from ftar_core.bench.peers.systems import System, Wishes, describe
from ftar_core.bench.report import BenchError

FAULTS = {
    "sigkill": "a replica's process is killed",
    "sigstop": "a replica's process is frozen",
    "node-loss": "all rails of a replica's node swallow everything, its process lives on",
}
TICK_S = 0.01
START_S = 120.0
GIVE_UP_S = 240.0
TOO_SLOW = 1.2
WARM = 20  # calm steps before the first incident
RATIO_JITTER = 0.25
MAX_CRASHES = 20


class Tail:
    """The lines of a journal as they are written."""

    def __init__(self, path: Path) -> None:
        self._path, self._place, self._rest = path, 0, b""

    def lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._place)
            more = file.read()
        self._place += len(more)
        *whole, self._rest = (self._rest + more).split(b"\n")
        found = []
        for line in whole:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found


class Drive:
    """One system under one kind of fault; its journals call that `label`. `tell`: what is going on, how far (0..1)."""

    def __init__(
        self,
        name: str,
        fault: str,
        label: str,
        *,
        wishes: Wishes,
        place: Place,
        directory: Path,
        tell: Callable[[str, float], None],
    ) -> None:
        directory.mkdir(parents=True)
        self.directory, self.wishes, self.place, self.fault = directory, wishes, place, fault
        self._tell = tell
        self._dice = random.Random(wishes.seed)
        keep = [h for i in range(wishes.replicas + 1) if (h := place.handle(i)) is not None]
        self._forks = Forks(directory, keep)
        try:
            self.system = System(name, wishes, place, self._forks, directory)
        except BaseException:
            self._forks.close()
            raise
        self._tails = {name: Tail(directory / f"{name}.jsonl") for name in self.system.replicas}
        self._last: dict[str, dict[str, Any]] = {}  # the last step of each replica's present life
        self._gaps: list[float] = []  # between commits at full strength
        self._lives = dict.fromkeys(self.system.replicas, 0)
        self._hit: str | None = None  # frozen or cut off, and not ended yet
        self._hit_at = 0.0
        self._crashes = 0
        self._struck = False
        self._journal = (directory / "bench.jsonl").open("a")
        self._about = {
            "schema": 1,
            "system": name,
            "fault": label,
            "replicas": self.system.replicas,
            "wanted": wishes.replicas,
            "step_ms": wishes.step_ms,
            "model": wishes.model,
            "seed": wishes.seed,
            "notes": self.system.notes,
            "place": "loopback" if place.why else "namespaces",
        }

    def __enter__(self) -> Drive:
        return self

    def __exit__(self, *_: object) -> None:
        if self._struck:  # also when it was interrupted: what there is can be read
            describe(self.directory, {**self._about, "ended": time.monotonic()})
        self._forks.close()
        self.system.close()
        self._journal.close()
        with contextlib.suppress(BenchError):
            self._reach()
        for name in ("token", "operator", "checkpoint", "checkpoint.new", "port", "lighthouse"):
            (self.directory / name).unlink(missing_ok=True)
        shutil.rmtree(self.directory / "store", ignore_errors=True)
        for left in self.directory.glob("rendezvous.*"):
            left.unlink(missing_ok=True)

    def _mark(self, kind: str, **more: Any) -> None:
        self._journal.write(json.dumps({"kind": kind, "at": time.monotonic()} | more) + "\n")
        self._journal.flush()

    # --- the supervisor

    def _start(self, name: str) -> None:
        self._lives[name] += 1
        self._last.pop(name, None)
        self.system.start(self.system.replicas.index(name), self._lives[name])

    def _start_all(self) -> None:
        life = max(self._lives.values())
        for name in self.system.replicas:
            self._lives[name] = life  # one rendezvous for all
            self._start(name)

    def _tick(self) -> None:
        """Read, restart what has ended, end what has been given up."""
        for name, tail in self._tails.items():
            for line in tail.lines():
                if line["kind"] == "step" and line["life"] == self._lives[name]:
                    before = self._last.get(name)
                    full = line["contributors"] == self.wishes.replicas
                    if full and before is not None and before["contributors"] == line["contributors"]:
                        self._gaps.append(line["t_commit"] - before["t_commit"])
                    self._last[name] = line
        ended = self._forks.ended()
        for end in ended:
            if end.name not in self._lives:
                words = self._forks.last_words(end.name)
                raise BenchError(f"{self.system.name}: the {end.name} has ended with {end.code}: {words}")
        if any(end.name not in self._forks.alive for end in ended):
            for end in ended:
                self._mark("ended", replica=end.name, code=end.code)
                if end.code != -signal.SIGKILL:
                    self._crashes += 1
                    if self._crashes > MAX_CRASHES:
                        raise BenchError(
                            f"{self.system.name}: {end.name} ends again and again: {self._forks.last_words(end.name)}",
                            hint=f"its log is {self.directory / (end.name + '.log')}",
                        )
            if self.system.whole:
                self._forks.kill([n for n in self.system.replicas if n in self._forks.alive])
                self._forks.ended()
                self._reach()
                self._start_all()
            else:
                for name in {end.name for end in ended} - set(self._forks.alive):
                    self._reach(name)
                    self._start(name)
        if self._hit is not None and not self.system.whole and self._gone_on():
            self._forks.kill([self._hit])  # and the next tick starts it again
        time.sleep(TICK_S)

    def _gone_on(self) -> bool:
        """Some other replica has committed a step that it began after the fault."""
        return any(n != self._hit and line["t_begin"] > self._hit_at for n, line in self._last.items())

    def _reach(self, name: str | None = None) -> None:
        """Its node has its network back (name None: whoever's it is)."""
        if self._hit is not None and name in {None, self._hit}:
            if self.fault == "node-loss":
                self.place.reachable(self.system.replicas.index(self._hit), True)
            self._hit = None

    # --- waiting

    def _full(self) -> bool:
        """All contribute, in their present lives, and a spare that is wanted follows."""
        strong = [n for n, line in self._last.items() if line["contributors"] == self.wishes.replicas]
        return (
            self._hit is None and len(strong) >= self.wishes.replicas and self._recent() and self.system.spare_ready()
        )

    def _newest(self) -> int:
        return max((line["step"] for line in self._last.values()), default=0)

    def _recent(self) -> bool:
        steps = sorted((line["step"] for line in self._last.values()), reverse=True)[: self.wishes.replicas]
        return len(steps) == self.wishes.replicas and steps[0] - steps[-1] <= 1

    def _until(self, condition: Callable[[], bool], within_s: float, what: str) -> bool:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                self._mark("gave-up", waiting_for=what)
                return False
            self._tick()
        return True

    def _calm(self, steps: int) -> None:
        goal = self._newest() + steps
        self._until(lambda: self._newest() >= goal, START_S, "calm steps")

    def begin(self, slow_ok: bool = False) -> None:
        """BenchError: it does not start, or this machine is too slow for the pace."""
        self._tell("starts", 0.0)
        for name in self.system.replicas:
            self._start(name)
        if not self._until(self._full, START_S, "all replicas"):
            words = "; ".join(f"{n}: {self._forks.last_words(n)}" for n in self.system.replicas)
            raise BenchError(f"{self.system.name} is not at full strength within {START_S:.0f} s: {words}")
        self._gaps.clear()
        self._calm(WARM)
        calm_ms = statistics.median(self._gaps) * 1000.0 if self._gaps else float("inf")
        if calm_ms > TOO_SLOW * self.wishes.step_ms and not slow_ok:
            raise too_slow(self.system.name, calm_ms, self.wishes.step_ms)

    # --- faults

    def _victim(self) -> str:
        """Somebody who contributes."""
        newest = self._newest()
        return self._dice.choice(sorted(n for n, line in self._last.items() if line["step"] >= newest - 1))

    def _strike(self, victim: str) -> None:
        self._hit_at = time.monotonic()
        if self.fault == "sigkill":
            self._forks.signal(victim, signal.SIGKILL)
        elif self.fault == "sigstop":
            self._hit = victim
            self._forks.signal(victim, signal.SIGSTOP)
        else:
            self._hit = victim
            self.place.reachable(self.system.replicas.index(victim), False)
        self._struck = True
        self._crashes = 0  # what was hit takes others along, each time
        self._mark("fault", victim=victim, at=self._hit_at)

    def incidents(self, count: int, calm: int) -> None:
        """So many, each when everything has been as before for `calm` steps."""
        for i in range(count):
            self._tell(f"incident {i + 1} of {count}", i / count)
            self._calm(calm)
            wait_s = self._dice.random() * self.wishes.step_ms / 1000.0
            deadline = time.monotonic() + wait_s
            self._until(lambda until=deadline: time.monotonic() >= until, 10, "")  # type: ignore[misc]
            victim = self._victim()
            self._strike(victim)
            life, best = self._lives[victim], self._newest()

            def over(victim: str = victim, life: int = life, best: int = best) -> bool:
                """It is back, and what was computed again is behind."""
                return self._lives[victim] > life and self._newest() > best and self._full()

            if not self._until(over, GIVE_UP_S, "full strength"):
                self._abandon(victim)
                if not self._until(self._full, START_S, "full strength"):
                    raise BenchError(f"{self.system.name} does not come back after {victim} was hit ({self.fault})")
                self._mark("over", failed=True)
                continue
            self._mark("over")
        self._calm(calm)

    def _abandon(self, victim: str) -> None:
        """The system did not go on by itself: help it, so that the next incident finds it whole."""
        self._forks.kill([n for n in self.system.replicas if n in self._forks.alive])
        self._reach(victim)

    def schedule(self, seconds: float, mtbf_s: float) -> None:
        """A kill every `mtbf_s`, give or take a quarter, whatever the system is doing then: times and dice are the same
        for all systems. The last one alive is spared."""
        begin = time.monotonic()
        times = [
            begin + (k + self._dice.uniform(-RATIO_JITTER, RATIO_JITTER)) * mtbf_s
            for k in range(1, max(2, round(seconds / mtbf_s) + 1))
        ]
        for k, at in enumerate(times):
            self._tell(f"kill {k + 1} of {len(times)}", k / len(times))
            self._until(lambda until=at: time.monotonic() >= until, mtbf_s * 3 + 10, "")  # type: ignore[misc]
            number = self._dice.randrange(self.wishes.replicas)
            alive = [n for n in self.system.replicas if n in self._forks.alive]
            likely = sorted(n for n in self._last if n in alive) or alive  # a spare costs nobody anything
            if len(alive) > 1:
                self._strike(likely[number % len(likely)])
        end = begin + (len(times) + 1) * mtbf_s
        self._until(lambda: time.monotonic() >= end, mtbf_s * 3 + 10, "")


def too_slow(system: str, calm_ms: float, step_ms: float) -> BenchError:
    wanted = -(-int(calm_ms * 1.3) // 50) * 50
    return BenchError(
        f"this machine is too slow for the pace: {system} takes {calm_ms:.0f} ms for a step of {step_ms:.0f} ms",
        hint=f"--pace {wanted}, or nothing else running beside it",
    )


def name_of(system: str, fault: str) -> str:
    return f"{system}.{fault}.{time.strftime('%Y%m%dT%H%M%S')}.{os.getpid()}"
