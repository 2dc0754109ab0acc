"""A storm over the plugin's connections: many streams between two nodes whose rails fail in every way and in any
overlap, while other connections come and go. At the end no byte is lost, doubled, moved, wrong or late, nothing hangs,
and nothing is left.

    python tests/native/nccl/storm.py --faults 1000        (or: make storm FAULTS=1000)

Everything random comes from one seed: the same seed makes the same plan. What the machine makes of it is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in {None, ""}:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    __package__ = "native.nccl"

from native import PATIENCE
from native.net import Net

from . import churn, weather
from .rig import QUICK, Rig
from .streams import MEGA

LIVE_S = 60.0  # every stream moves within so much, once the faults are lifted; a bound for hangs, not a figure
SMALL = [0, 8, 4096, 70_000]
MIXED = [0, 1, 4096, 300_000, 70_000, MEGA + 5, 8, 2 * MEGA]
LARGE = [64 * MEGA, 5, 4 * MEGA, 0, 300_000, 8, 1, MEGA, 4096, 12_345, 70_000]
SLOWER_MS = (5, 20, 50)
WARM_UP = 0.3  # of the rounds: buffers and pools have their size then
MORE_MEMORY = 24 * MEGA  # after many rounds; a short storm ends before everything has had its largest size
MANY_ROUNDS = 100


@dataclass
class Settings:
    seed: int
    faults: int = 50
    rails: int = 2
    mode: str = ""  # for FTAR_NET_OPTIONS; empty: the default
    large: bool = True
    pauses_ms: tuple[int, ...] = (0, 0, 3, 20)  # between a stream's messages; one of these each
    heavy: bool = False  # sanitizers: memory is theirs
    say: Callable[[str], None] = lambda line: None


@dataclass
class Result:
    faults: int = 0
    rounds: int = 0
    moves: int = 0
    streams: int = 0
    messages: int = 0
    bytes: int = 0
    visits: int = 0
    damaged: int = 0
    took_s: float = 0.0
    memory: list[int] = field(default_factory=list)  # growth in bytes, by node

    def __str__(self) -> str:
        grown = ", ".join(f"{m / MEGA:+.1f}" for m in self.memory)
        return (
            f"{self.faults} faults in {self.rounds} rounds, {self.moves} moves of data to another rail;"
            f" {self.streams} streams, {self.messages} messages, {self.bytes / 1e9:.2f} GB checked;"
            f" {self.visits} connections came and went;"
            f" {self.damaged} damaged segments; memory {grown} MB; {self.took_s:.0f} s"
        )


class Storm:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        dice = random.Random(settings.seed)
        self.rounds = weather.plan(dice, settings.faults, settings.rails, weather.can_corrupt())
        self.visits = churn.plan(dice, 60, settings.rails)
        self.windows = [dice.choice([1, 2, 8, 24]) for _ in range(4 * settings.rails**2)]
        pauses = SLOWER_MS if settings.heavy else settings.pauses_ms
        self.pauses = [dice.choice(pauses) / 1e3 for _ in self.windows]
        self.log: list[str] = []
        self.begun = time.monotonic()

    def note(self, line: str) -> None:
        self.log.append(f"{time.monotonic() - self.begun:9.3f}  {line}")

    def run(self) -> Result:
        options = QUICK + (f",mode={self.settings.mode}" if self.settings.mode else "")
        try:
            with Net(nodes=2, rails=self.settings.rails) as net:
                # Arenas would make memory look like a leak: as many as threads.
                with Rig(net, FTAR_NET_OPTIONS=options, MALLOC_ARENA_MAX="2") as rig:
                    try:
                        return self.blow(net, rig)
                    except BaseException:
                        self.note(f"failed; the plugin said {rig.logs()}")
                        raise
        except Exception as error:
            log = "\n".join(self.log[-120:])
            raise AssertionError(f"storm with seed {self.settings.seed}: {error}\n{log}\n{self.again()}") from error

    def again(self) -> str:
        s = self.settings
        mode = f" --mode {s.mode}" if s.mode else ""
        return f"again: python {Path(__file__)} --seed {s.seed} --faults {s.faults} --rails {s.rails}{mode}"

    def blow(self, net: Net, rig: Rig) -> Result:
        pids = [p.process.pid for p in rig.peers]
        self.warm(rig)
        bare = [self.settled(rig, pid) for pid in pids]
        comms = self.connect(rig)
        rig.advance(3, LIVE_S)
        connected = [self.settled(rig, pid) for pid in pids]
        result = Result(streams=len(comms))
        memory: list[list[int]] = [[], []]
        visitor = churn.Churn(rig.peers, self.visits)
        with weather.Weather(net, pids) as w:
            visitor.start()
            for number, r in enumerate(self.rounds):
                self.weather(w, number, r)
                result.faults += len(r.faults)
                self.everybody_moves(rig, number, visitor)
                for node, pid in enumerate(pids):
                    memory[node].append(weather.resources(pid)["memory"])
                if number % 20 == 19:
                    moves = sum(p.ask("moves") for p in rig.peers)
                    self.settings.say(
                        f"{result.faults} faults, {moves} moves, {visitor.done} visits, {memory[0][-1] >> 20} MB"
                    )
            visitor.stopping.set()
            visitor.join(churn.WAIT_S * PATIENCE)
            if visitor.error is not None or visitor.is_alive():
                raise AssertionError(f"{visitor.now}: {visitor.error or 'hangs'}")
            result.damaged = sum(w.damaged(i) for i in (0, 1))
        result.rounds, result.visits = len(self.rounds), visitor.done
        self.note("the storm is over")
        self.back_to(rig, pids, connected, "with the connections of the beginning")
        self.finish(rig, comms, result)
        self.back_to(rig, pids, bare, "without connections")
        for peer in rig.peers:
            peer.ask("finalize")
        for node, pid in enumerate(pids):
            rig.until(lambda p=pid: not weather.network_sockets(p), "no socket is left", LIVE_S)  # type: ignore[misc]
            result.memory.append(self.growth(memory[node]))
            more = MORE_MEMORY if len(self.rounds) >= MANY_ROUNDS else 4 * MORE_MEMORY
            if result.memory[node] > more and not self.settings.heavy:
                raise AssertionError(f"node{node}: memory grew by {result.memory[node] / MEGA:.1f} MB during the storm")
        result.bytes += visitor.bytes
        result.took_s = time.monotonic() - self.begun
        return result

    def warm(self, rig: Rig) -> None:
        """What a process takes once and keeps is taken."""
        for sender in (0, 1):
            comms = rig.connect(sender, 1 - sender)
            rig.stream(sender, 1 - sender, comms, SMALL, count=4)
            rig.until(lambda: all(s["done"] == 4 for s in rig.states()), "the first messages")
            rig.peers[sender].ask("close", kind="send", comm=comms[0])
            rig.peers[1 - sender].ask("close", kind="receive", comm=comms[1])
            for peer in rig.peers:
                peer.ask("forget")

    def settled(self, rig: Rig, pid: int) -> dict[str, Any]:
        """Its resources when they have been the same for a while."""
        last: dict[str, Any] = {}
        same = 0

        def steady() -> bool:
            nonlocal last, same
            now = weather.resources(pid)
            same = same + 1 if (now["files"], now["threads"]) == (last.get("files"), last.get("threads")) else 0
            last = now
            time.sleep(0.02)
            return same >= 10

        rig.until(steady, "steady resources", LIVE_S)
        return last

    def connect(self, rig: Rig) -> list[tuple[int, tuple[int, int]]]:
        """(sender, its connection): every device with every device, both ways."""
        out = []
        rails = self.settings.rails
        rig.streams = 0
        for here in range(rails):
            for there in range(rails):
                for sender in (0, 1):
                    for twice in range(2 if here == there and rails < 3 else 1):
                        number = len(out)
                        sizes = MIXED if twice == 0 else SMALL
                        if self.settings.large and number == 0:
                            sizes = LARGE
                        comms = rig.connect(sender, 1 - sender, there, here)
                        window = min(2, self.windows[number]) if sizes is LARGE else self.windows[number]
                        rig.stream(sender, 1 - sender, comms, sizes, window=window, pause_s=self.pauses[number])
                        out.append((sender, comms))
        return out

    def weather(self, w: weather.Weather, number: int, r: weather.Round) -> None:
        self.note(f"round {number}: {r.what}")
        begun = time.monotonic()
        active: list[weather.Fault] = []
        try:
            for at_ms, fault, begins in r.timeline():
                time.sleep(max(0.0, begun + at_ms / 1e3 - time.monotonic()))
                if begins:
                    active.append(fault)
                    fault.begin(w)
                    self.note(str(fault))
                else:
                    active.remove(fault)
                    fault.end(w)
                    self.note(f"{fault.kind} node{fault.node}/rail{fault.rail} lifted")
        finally:
            for fault in active:
                fault.end(w)
        time.sleep(r.calm_ms / 1e3)

    def everybody_moves(self, rig: Rig, number: int, visitor: churn.Churn) -> None:
        try:
            rig.advance(1, LIVE_S)
        except AssertionError as error:
            stuck = [p.ask("state") for p in rig.peers]
            raise AssertionError(
                f"round {number}: a stream stands still or failed: {error}; {json.dumps(stuck)}"
            ) from None
        if visitor.error is not None:
            raise AssertionError(f"round {number}: {visitor.now}: {visitor.error}") from visitor.error

    def back_to(self, rig: Rig, pids: list[int], wanted: list[dict[str, Any]], when: str) -> None:
        for node, pid in enumerate(pids):

            def given_back(pid: int = pid, w: dict[str, Any] = wanted[node]) -> bool:
                now = weather.resources(pid)
                return bool(now["files"] <= w["files"] and now["threads"] <= w["threads"])

            try:
                rig.until(given_back, "", LIVE_S)
            except AssertionError:
                now, files = (
                    weather.resources(pid),
                    [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")],
                )
                raise AssertionError(f"node{node} {when}: has {now}, had {wanted[node]}: {files}") from None

    def finish(self, rig: Rig, comms: list[tuple[int, tuple[int, int]]], result: Result) -> None:
        """Senders end at a message's end, receivers have all of it and nothing else, and everybody closes."""
        for peer in rig.peers:
            peer.ask("halt-senders")
        count = len(comms)

        def ends() -> list[tuple[dict[str, Any], dict[str, Any]]]:
            """(sender, receiver) of each stream; a peer lists its streams in the order in which they were made."""
            states = [p.ask("state") for p in rig.peers]
            assert [s["error"] for peer in states for s in peer if s["error"]] == [], rig.logs()
            return [(states[sender][k], states[1 - sender][k]) for k, (sender, _) in enumerate(comms)]

        rig.until(lambda: all(not s["alive"] for s, _ in ends()), "all senders have ended", 2 * LIVE_S)
        rig.until(lambda: all(r["done"] == s["done"] for s, r in ends()), "everything sent is received", LIVE_S)
        assert [p.ask("untouched") for p in rig.peers] == [[True] * (count // 2)] * 2, "a byte came late"
        for s, r in ends():
            assert s["done"] == r["done"], (s, r)
            assert s["bytes"] == r["bytes"], (s, r)
            result.messages += r["done"]
            result.bytes += r["bytes"]
        result.moves = sum(p.ask("moves") for p in rig.peers)
        for peer in rig.peers:
            assert not any(peer.ask("stop")), "a stream's thread hangs"
        for k, (sender, (send, receive)) in enumerate(comms):
            ends_of = [(sender, "send", send), (1 - sender, "receive", receive)]
            for node, kind, comm in ends_of if k % 2 else reversed(ends_of):
                rig.peers[node].ask("close", kind=kind, comm=comm)
        for peer in rig.peers:
            peer.ask("forget")

    def growth(self, samples: list[int]) -> int:
        """From the end of the warm-up to the end; medians, since receive buffers of visitors come and go."""
        if len(samples) < 2:
            return 0
        rest = samples[int(len(samples) * WARM_UP) :]
        part = max(1, len(rest) // 4)
        return int(statistics.median(rest[-part:]) - statistics.median(rest[:part]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Fail the rails of the NCCL plugin's connections at random.")
    parser.add_argument("--faults", type=int, default=1000, help="at least so many")
    parser.add_argument("--seed", type=int, help="the plan; default: a new one each time")
    parser.add_argument("--rails", type=int, choices=[2, 3], default=2)
    parser.add_argument("--mode", choices=["backup", "stripe"], default="", help="FTAR_NET_OPTIONS mode")
    parser.add_argument("--rounds", type=int, default=1, help="so many storms in a row, with seeds that follow")
    parser.add_argument("--no-large", action="store_true", help="no messages of 64 MB")
    parser.add_argument("--heavy", action="store_true", help="the plugin's build has a sanitizer: memory is not judged")
    q = parser.parse_args()
    if q.faults < 1 or q.rounds < 1:
        parser.error("--faults and --rounds take a number from 1 on")
    seed = q.seed if q.seed is not None else int.from_bytes(os.urandom(4), "little")
    for k in range(q.rounds):
        settings = Settings(seed + k, q.faults, q.rails, q.mode, large=not q.no_large, heavy=q.heavy)
        settings.say = lambda line: print(f"  {line}", flush=True)
        print(f"storm: seed {seed + k}, {q.faults} faults, {q.rails} rails{' ' + q.mode if q.mode else ''}", flush=True)
        try:
            print(Storm(settings).run(), flush=True)
        except AssertionError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
