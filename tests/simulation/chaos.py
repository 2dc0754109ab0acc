"""A seeded driver: of everything that can happen next it picks something, and now and then a fault.

Each action takes a few milliseconds of simulated time, so that timeouts fire in the middle of everything. Faults end
after a while; then all is healed, and the job must commit further steps, or say why it cannot.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ftar_core.protocol.config import Detection, JobConfig
from ftar_core.protocol.events import BeatSeen, Tick
from ftar_core.wire.exits import RankExit
from ftar_core.wire.heartbeat import Phase

from .life import Life
from .link import Link
from .server import Server
from .truth import ROTATION, Violation
from .world import World

BEAT_S = 0.25
DETECTION = Detection(
    heartbeat_interval_s=BEAT_S,
    suspect_after_s=1.0,
    evict_after_s=2.0,
    unreachable_wait_s=0.2,
    max_evictions=0,
    hung_after_s=1.5,
    evidence_wait_s=0.5,
)
AFTER_HEAL = 4  # further steps that must be committed


@dataclass
class Outcome:
    steps: int
    ended: str  # "progress", or why the job rightly stands
    faults: int
    rewound: int = 0  # how often it began again from a checkpoint


ROUNDS = (0, 0, 0, 1, 2, 3, 4, 7)
EVERY = (0, 0, 0, 1, 3)  # steps between checkpoints; 0: there are none


class Chaos:
    """One run. The same seed gives the same run. `limit`: the data has so many batches (0: no end). `rounds`: what an
    update may be of, in batches (0: every step is one). `every`: how many steps may be between checkpoints."""

    def __init__(
        self,
        seed: int,
        *,
        quiet: bool = True,
        limit: int = 0,
        rounds: Sequence[int] = ROUNDS,
        every: Sequence[int] = EVERY,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.flips = flips = random.Random(seed ^ 0x466C6970)  # of its own: other histories stay what they were
        self.flips_left = flips.choice((0, 0, 0, 1, 1, 2, 4))
        self.flipped = 0
        replicas = rng.choice((2, 3, 3, 3, 4, 5))
        spares = rng.choice((0, 0, 0, 1, 1, 2))
        self.names = [f"r{i}" for i in range(replicas + spares)]
        config = JobConfig(
            job="job",
            replicas=replicas,
            spares=spares,
            min_replicas=rng.choice((1, 1, min(2, replicas), replicas)),
            start_timeout_s=3.0,
            detection=replace(DETECTION, evict_hung=rng.random() < 0.5, evict_diverged=flips.random() < 0.5),
            continue_unattributed=flips.random() < 0.3,
            recovery_wait_s=2.0,
            gather_s=0.5,
            hold_exit_s=60.0,
            member_wait_s=90.0,
            prepare_s=0.5,
            promote_wait_s=rng.choice((0.05, 0.3)),
            record_retry_s=0.3,
            record_check_s=0.9,
        )
        self.world = world = World(config, quiet=quiet)
        world.limit = limit
        world.truth.round = random.Random(seed ^ 0x526F756E64).choice(rounds)
        world.every = random.Random(seed ^ 0x4469736B).choice(every)
        odd = rng.randrange(3, 9)
        world.finite = lambda step, result: step % odd != 0
        self.world.on_closing = lambda link: None
        self.pf = rng.choice((0.01, 0.02, 0.04))
        self.budget = rng.randrange(1, 8)
        self.faults = 0
        self.lossy = rng.random() < 0.15  # this run may lose the store
        self.wipe = self.wiped = self.twins = False
        self.cut: dict[str, float] = {}  # replica -> until when it cannot connect
        self.resume: dict[object, float] = {}  # paused -> until
        self.hung: dict[Life, float] = {}  # beats, hears and answers, but its training thread gets nowhere -> until
        self.restarts: list[tuple[float, str]] = []
        self.asked = 0  # operators' requests
        self.server_at: float | None = None
        self.broken_until = 0.0
        self.next_beat = 0.0
        self.healed = False
        self.slow: set[str] = set()
        world.start_server()
        for name in self.names:
            if rng.random() < 0.9:
                world.start_life(name, "initial state" if rng.random() < 0.95 else "another state")
            else:
                self.restarts.append((rng.random() * 4, name))

    def run(self, limit: int = 6000) -> Outcome:
        rng, world = self.rng, self.world
        actions = rng.randrange(100, 700)
        for _ in range(actions):
            self._one()
            if self.faults < self.budget and rng.random() < self.pf:
                self._fault()
        self.flips_left = 0
        self._heal()
        goal = world.truth.last + AFTER_HEAL
        for _ in range(limit):
            if world.limit and len(world.truth.trained) == world.limit:
                world.truth.all_dealt(world.limit, set())
                return Outcome(world.truth.last, "all trained", self.faults, world.truth.rewound)
            self._one()
            if world.now >= self.next_look:
                self._let_in()
            if self._over():
                break
            if not self.flipped and world.truth.alarms:
                raise Violation(f"E: a false alarm: {world.truth.alarms}")
            if not world.limit and self.world.truth.last >= goal:
                self._account()
                return Outcome(self.world.truth.last, "progress", self.faults, world.truth.rewound)
        return Outcome(self.world.truth.last, self._excuse(), self.faults, world.truth.rewound)

    # --- what happens by itself

    def _one(self) -> None:
        world, rng = self.world, self.rng
        world.now += rng.expovariate(1 / 0.006)
        self._time()
        if self.flips_left and self.flips.random() < 0.01:
            self._flip()
        choices = self._choices()
        if choices:
            rng.choice(choices)()
        else:
            world.now += 0.05

    def _time(self) -> None:
        world = self.world
        now = world.now
        for server in world.servers:
            if server.alive and not server.paused:
                deadline = server.machine.deadline()
                if deadline is not None and deadline <= now:
                    server.feed(Tick())
        if now >= self.next_beat:
            self.next_beat = now + BEAT_S
            self._beats()
        for who, until in list(self.resume.items()):
            if until <= now:
                del self.resume[who]
                who.paused = False  # type: ignore[attr-defined]
        for name, until in list(self.cut.items()):
            if until <= now:
                del self.cut[name]
        self.hung = {life: until for life, until in self.hung.items() if until > now}
        if self.broken_until and self.broken_until <= now:
            world.store.broken, self.broken_until = False, 0.0
        self._supervise(now)

    def _supervise(self, now: float) -> None:
        """Starts again what ended and should be started again."""
        world = self.world
        for life in world.lives:
            if not life.alive and life.name is not None and not getattr(life, "counted", False):
                life.counted = True  # type: ignore[attr-defined]
                code = life.exit.exit_code if life.exit is not None else -9
                if code in (-9, RankExit.RESTART):
                    self.restarts.append((now + self.rng.uniform(0.05, 0.8), life.name))
            elif life.alive and not life.paused:
                deadline = life.member.deadline()
                if deadline is not None and deadline <= now:
                    life.feed(Tick())
        for at, name in list(self.restarts):
            if at <= now:
                self.restarts.remove((at, name))
                if not any(x.name == name and x.alive and not x.paused for x in world.lives):
                    world.start_life(name)
                elif self.healed:
                    self.restarts.append((now + 0.5, name))  # its old process still has to end
        if self.server_at is None and not any(s.alive for s in world.servers):
            last = world.servers[-1].exit
            if last is None or last.exit_code == 75:
                self.server_at = now + self.rng.uniform(0.05, 1.0)
        if self.server_at is not None and self.server_at <= now:
            self.server_at = None
            if self.wipe and not any(s.alive for s in world.servers):
                world.say("!! the record is lost")
                world.store.wipe()
                self.wipe, self.wiped = False, True
            world.start_server()

    def _beats(self) -> None:
        for link in self.world.links:
            life, server = link.life, link.server
            heard = link.server_open and server.alive and not server.paused and not link.broken
            if heard and life.alive and not life.paused:
                phase, produced = (Phase.REDUCE, 4) if life.contributed else (Phase.FORWARD, 0)
                server.feed(BeatSeen(link.conn, phase, life.step, produced, 0))

    def _choices(self) -> list[Callable[[], object]]:
        world = self.world
        out: list[Callable[[], object]] = []
        for link in list(world.links):
            self._link_choices(link, out)
        servers = [s for s in world.servers if s.alive and not s.paused]
        for life in world.lives:
            if not life.alive or life.paused:
                continue
            if life.name in self.slow and self.rng.random() < 0.9:
                continue
            if life.wants_link and servers and life.name not in self.cut:
                out.append(lambda life=life: life.connect(self._choose_server(servers)))
            if life.may_contribute() and life not in self.hung:
                out.append(life.contribute)
            if life.may_reduce():
                out.append(life.reduce)
            if life.may_give_up():
                out.append(life.give_up)
            if life.may_ready():
                out.append(life.ready)
            if life.may_write() and self.rng.random() < 0.2:
                out.append(life.write)
            if life.may_restore() and self.rng.random() < 0.3:
                out.append(life.restore)
            if life.may_follow() and self.rng.random() < 0.3:
                out.append(life.follow)
        return out

    def _choose_server(self, servers: list[Server]) -> Server:
        return servers[-1] if self.rng.random() < 0.8 else self.rng.choice(servers)

    def _link_choices(self, link: Link, out: list[Callable[[], object]]) -> None:
        world, server, life = self.world, link.server, link.life
        here = server.alive and link.conn in server.links
        there = life.alive and link.life_open
        if not here and not there:
            world.links.remove(link)
            return
        if here and not server.paused:
            if link.up and not link.broken:
                out.append(lambda: world.deliver_up(link))
            elif link.broken or not there:
                out.append(lambda: world.notice_server(link))
        if there and not life.paused:
            if link.down and not link.broken:
                out.append(lambda: world.deliver_down(link))
            elif link.broken or not here:
                out.append(lambda: world.notice_life(link))

    # --- faults

    def _fault(self) -> None:
        self.faults += 1
        rng = self.rng
        kinds = [
            self._kill,
            self._kill,
            self._kill_many,
            self._break,
            self._cut_group,
            self._pause,
            self._hang,
            self._crash_server,
            self._crash_server,
            self._pause_server,
            self._second_server,
            self._break_store,
            self._operator,
            self._operator,
            self._repeat,
            self._slow,
            self._lose_ring,
            self._new_twin,
        ]
        if self.world.every:
            kinds += [self._kill_all, self._kill_all]
        rng.choice(kinds)()

    def _living(self) -> list[Life]:
        return [x for x in self.world.lives if x.alive]

    def _kill(self) -> None:
        living = self._living()
        if living:
            life = self.rng.choice(living)
            self.world.say(f"!! {life} is killed")
            if self.rng.random() < 0.5:
                life.die()
            else:  # what it had said is still on the way
                life.die(clean=True)

    def _kill_many(self) -> None:
        living = self._living()
        for life in self.rng.sample(living, self.rng.randrange(0, len(living) + 1)):
            self.world.say(f"!! {life} is killed, with others")
            life.die()

    def _kill_all(self) -> None:
        self.world.say("!! all replicas are killed")
        for life in self._living():
            life.die()

    def _break(self) -> None:
        if self.world.links:
            link = self.rng.choice(self.world.links)
            self.world.say(f"!! the connection of {link.life} breaks")
            link.cut()

    def _cut_group(self) -> None:
        group = self.rng.sample(self.names, self.rng.randrange(1, len(self.names) + 1))
        self.world.say(f"!! {group} are cut off from the coordinator")
        for name in group:
            self.cut[name] = self.world.now + self.rng.uniform(0.2, 6)
        for link in self.world.links:
            if link.life.name in group:
                link.cut()

    def _pause(self) -> None:
        living = self._living()
        if living:
            life = self.rng.choice(living)
            self.world.say(f"!! {life} is paused")
            life.paused = True
            self.resume[life] = self.world.now + self.rng.uniform(0.1, 6)

    def _hang(self) -> None:
        living = self._living()
        if living:
            life = self.rng.choice(living)
            self.world.say(f"!! {life} hangs")
            self.hung[life] = self.world.now + self.rng.uniform(0.5, 6)

    def _crash_server(self) -> None:
        alive = [s for s in self.world.servers if s.alive]
        if not alive:
            return
        server = self.rng.choice(alive)
        if self.rng.random() < 0.6:
            server.crash_in = self.rng.randrange(0, 12)  # in the middle of what it does next
            self.world.say(f"!! {server.name} will crash in {server.crash_in} effects")
        else:
            self.world.say(f"!! {server.name} is killed")
            server.crash("killed")
        if self.lossy and self.rng.random() < 0.7:
            self.wipe = True  # the next one finds nothing

    def _pause_server(self) -> None:
        alive = [s for s in self.world.servers if s.alive]
        if alive:
            server = self.rng.choice(alive)
            self.world.say(f"!! {server.name} is paused")
            server.paused = True
            self.resume[server] = self.world.now + self.rng.uniform(0.1, 4)

    def _second_server(self) -> None:
        if sum(s.alive for s in self.world.servers) < 3:
            self.world.say("!! another coordinator is started")
            self.world.start_server()

    def _break_store(self) -> None:
        self.world.say("!! the store cannot write")
        self.world.store.broken = True
        self.broken_until = self.world.now + self.rng.uniform(0.2, 3)

    def _operator(self) -> None:
        alive = [s for s in self.world.servers if s.alive and not s.paused]
        if alive:
            op = self.rng.choice(("drain", "drain", "evict", "rejoin"))
            options = {"rejoin": self.rng.random() < 0.7} if op == "evict" else {}
            name = self.rng.choice(self.names)
            server, force = self.rng.choice(alive), self.rng.random() < 0.2
            self.asked += 1
            incident = f"i-{self.asked}" if self.asked % 2 else ""  # an agent asks, or a person
            share = 0.0 if self.asked % 7 else 0.5
            reply = server.operate(op, name, force=force, incident=incident, max_share=share, **options)
            if self.asked % 5 == 0:
                server.operate("restarts", self.names[self.asked % len(self.names)], incident=f"i-{self.asked}-again")
            self.world.say(f"!! operator: {op} {name}: {reply.code} {reply.text}")
            if reply.code == "ok" and op == "rejoin":
                self.restarts.append((self.world.now + 0.3, name))

    def _repeat(self) -> None:
        """A message arrives twice."""
        busy = [x for x in self.world.links if x.up or x.down]
        if busy:
            link = self.rng.choice(busy)
            queue = link.up if link.up and (not link.down or self.rng.random() < 0.5) else link.down
            if type(queue[0]).__name__ not in ("Hello", "Welcome", "Leaving"):
                queue.append(queue[0])

    def _flip(self) -> None:
        """A bit of some replica's memory."""
        holders = [x for x in self._living() if x.history]
        if holders:
            self.flips_left, self.flipped = self.flips_left - 1, self.flipped + 1
            life, slot = self.flips.choice(holders), self.flips.randrange(ROTATION)
            if self.flips.random() < 0.5:
                self.world.say(f"!! a bit flips in the next result of {life}")
                life.spoils = self.flipped
            else:
                self.world.say(f"!! a bit flips in slice {slot} of the state of {life}")
                life.flips[slot] = 100 * self.flipped + life.flips.get(slot, 0)

    def _decide(self) -> None:
        """An operator who is asked whose results are wrong does not know better, but decides."""
        for server in [s for s in self.world.servers if s.alive and not s.paused]:
            job = server.machine.job
            if job.diverged and len(job.contributors()) > 1:
                name = self.flips.choice(job.contributors())
                reply = server.operate("evict", name, force=True)
                self.world.say(f"!! operator: results differ, evict {name}: {reply.code} {reply.text}")

    def _slow(self) -> None:
        self.slow ^= {self.rng.choice(self.names)}

    def _lose_ring(self) -> None:
        """A preparation goes nowhere."""
        for life in self._living():
            life.preparing = None

    def _new_twin(self) -> None:
        """A second process of a replica, while the first still lives."""
        self.twins = True
        self.world.start_life(self.rng.choice(self.names))

    # --- the end

    def _heal(self) -> None:
        world = self.world
        world.say("-- no more faults")
        self.healed = True
        self.slow.clear()
        self.hung.clear()
        self.cut.clear()
        for who in list(self.resume):
            who.paused = False  # type: ignore[attr-defined]
        self.resume.clear()
        world.store.broken = False
        for server in world.servers:
            server.crash_in = None
        if not any(s.alive for s in world.servers) and world.servers[-1].exit is None:
            world.start_server()
        self._supervise(world.now)
        self._let_in()
        record = world.store.record
        lives = {(m.replica, m.incarnation) for m in record.epoch.members} if record is not None else set()
        self.holders = [x for x in world.lives if x.alive and (x.name, x.member.incarnation) in lives]

    def _let_in(self) -> None:
        """Nobody stays out for good; a drain may take effect only now."""
        self.next_look = self.world.now + 1.0
        self._decide()
        for server in [s for s in self.world.servers if s.alive]:
            for name in self.names:
                if name in server.machine.job.table.cordoned:
                    server.operate("rejoin", name)
                    self.restarts.append((self.world.now, name))

        for name in self.names:
            lives = [x for x in self.world.lives if x.name == name]
            end = lives[-1].exit if lives and not any(x.alive for x in lives) else None
            if end is not None and end.exit_code == RankExit.DRAINED:
                self.restarts.append((self.world.now, name))

    def _over(self) -> bool:
        """The last coordinator ended for good."""
        last = self.world.servers[-1]
        return not last.alive and last.exit is not None and last.exit.exit_code != 75 and self.server_at is None

    def _account(self) -> None:
        """Every batch exactly once."""
        truth = self.world.truth
        deal = self.world.deals.get(truth.last + 1)
        if deal is not None:
            truth.all_dealt(deal.cursor, set(deal.batches.values()) | set(deal.returned))

    def _excuse(self) -> str:
        """Why no further step was committed; a Violation if there is no good reason."""
        world = self.world
        alive = [s for s in world.servers if s.alive and not self._over()]  # of an older term, it knows nothing of this
        if world.disk and not self.wiped:
            view = alive[-1].machine.view(world.now, world.now) if alive else world.servers[-1].exit
            raise Violation(f"liveness: checkpoints {sorted(world.disk)} are there, and nobody goes on: {view}")
        if not alive:
            stop = world.servers[-1].exit
            # A twin looks like the restart of a process that is dead; nobody can see that it is only cut off.
            if stop is not None and stop.reason and (not self.holders or self.wiped or self.twins):
                return f"stopped: {stop.reason}"
            raise Violation(f"liveness: no coordinator: {stop}, holders {[str(h) for h in self.holders]}")
        view = alive[-1].machine.view(world.now, world.now)
        if view.state in ("recovering", "holding") and view.reason and (not self.holders or self.wiped):
            return f"{view.state}: {view.reason}"
        raise Violation(
            f"liveness: {view.state} at step {view.step}: {view.reason!r}, {[str(h) for h in self.holders]}"
        )


def run(seed: int, limit: int = 0, every: Sequence[int] = EVERY) -> Outcome:
    """One seed; a Violation carries the history."""
    try:
        return Chaos(seed, limit=limit, every=every).run()
    except Exception as error:
        again = Chaos(seed, quiet=False, limit=limit, every=every)
        try:
            again.run()
        except Exception:  # the same one
            pass
        story = "\n".join(again.world.history[-120:])
        raise Violation(f"seed {seed}: {type(error).__name__}: {error}\n{story}") from error
