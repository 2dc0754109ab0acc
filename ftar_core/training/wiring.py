"""Everything of a rank that is not the training thread: the native engine, the control loop (the member's own, or the
one that rank 0 and the other ranks of a replica share), heartbeats, reports.

`Wiring` is the control loop's delegate. It translates and passes on; decisions are the member machine's, the training
state is the session's, what must be atomic is in `exchange`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from ftar_core.errors import SettingsError
from ftar_core.native import core, require
from ftar_core.protocol.effects import ApplyCommit, EnterEpoch, FollowSources, StandDown, TellParts
from ftar_core.protocol.events import Explanation, MemberEvent, PeerUnreachable, RingReady
from ftar_core.protocol.member import Member as MemberMachine
from ftar_core.runtime import breakpoints
from ftar_core.runtime.connection import MemberRuntime
from ftar_core.runtime.follower import TeamFollower
from ftar_core.runtime.leader import TeamLeader
from ftar_core.runtime.pulse import Pulse
from ftar_core.runtime.settings import Settings
from ftar_core.runtime.team import RankFacts
from ftar_core.training import rendezvous
from ftar_core.training.exchange import Exchange
from ftar_core.training.journal import Journal
from ftar_core.training.lockstep import Agreement
from ftar_core.training.memories import HostMemory, Memory
from ftar_core.training.memory import SHADOW_SHARE, SOURCE_SHARE, available_bytes, replay_buffer_bytes
from ftar_core.training.plan import BucketPlan
from ftar_core.training.reporting import Reporter
from ftar_core.training.retention import Inputs
from ftar_core.training.transfer import StateServer
from ftar_core.wire.exits import RankExit
from ftar_core.wire.heartbeat import BUSY, Phase
from ftar_core.wire.ids import EpochId, epoch_key
from ftar_core.wire.messages import Deal, Endpoint, EpochInfo, Message, Outline, RailNotice, RankInfo
from ftar_core.wire.team import Ballot

if TYPE_CHECKING:
    from ftar_core.native._core import Device, Event, Options
    from ftar_core.training.nccl.plane import NcclPlane, Parts

log = logging.getLogger("ftar.session")
EPOCHS_KEPT = 32
VERDICT_S = 1.0  # a dead process is known to the coordinator in 0.2 s, a silent one of the lab in 0.5 s
# A training thread of a broken replica of several ranks that is in our hands; in the user's it gets no time at all.
BROKEN_GRACE_S = 1.0


class RankRuntime(Protocol):
    """The control loop of this rank: the member's own (one rank a replica), the leader's, or that of another rank."""

    def start(self) -> None: ...
    def post(self, event: MemberEvent) -> None: ...
    def tell(self, message: Message) -> None: ...
    def close(self) -> None: ...


class Wiring:
    """`end_grace_s`: a training thread that has not noticed the end of its member by then (it hangs) is not waited
    for: the process exits, so that its supervisor can start it again."""

    def __init__(
        self,
        *,
        settings: Settings,
        plan: BucketPlan,
        retained: Inputs,
        reduced: Sequence[torch.Tensor],
        state_digest: str,
        begin: Deal,
        last_step: int,
        journal: Journal,
        options: Options | None,
        stream_buffer_bytes: int,
        end_grace_s: float,
        first_steps: int = 0,
        first_steps_budget_s: float = 600.0,
        restores: bool = False,
        checkpoint_s: float = 0.0,
        nccl: Parts | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.settings = settings
        self._restores = restores
        self._checkpoint_s = checkpoint_s
        self._plan, self._last_step, self._journal = plan, last_step, journal
        self._end_grace_s = end_grace_s
        self._lock = threading.Lock()
        self._pulse = Pulse(settings.rank)
        self._phase = Phase.STARTUP
        self._first_steps, self._first_budget_s = first_steps, first_steps_budget_s
        self._ends: float | None = self._budget_ends()  # of the phase's budget, CLOCK_MONOTONIC
        self._pulse.budget(self._ends)
        self._progress = (0, 0, 0)
        self._epochs: dict[bytes, EpochId] = {}  # by their keys on the links; the last few
        self._rails_down: set[tuple[str, str]] = set()  # (peer, rail), as the coordinator was told
        self._end_noticed = threading.Event()
        # The training thread runs the user's code, which may wait for the other ranks of the replica.
        self.in_user_code = False
        self.updating = False  # it runs the user's update
        self.incarnation = 0
        self.parts: Callable[[int], tuple[tuple[str, int], ...]] = lambda step: ()  # of that step's digests
        memory = memory or HostMemory()
        self._device = memory.native
        self.engine = _engine(settings, options, memory.native)
        self.plane = self._nccl_plane(nccl, retained, reduced) if nccl is not None else None
        self.exchange = Exchange(
            job=settings.job,
            replica=settings.replica,
            plan=plan,
            ring=self.plane or self.engine,
            retained=retained,
            reduced=reduced,
            on_progress=self._progressed,
            rank=settings.rank,
            release=None if retained.keeps else retained.release,
            on_device=memory.on_device,
            submit_on_device=partial(self.engine.submit, on_device=True),
        )
        self.server = StateServer(
            job=settings.job,
            token=settings.token,
            plan=plan.hash,
            rails=settings.rails,
            on_request=self.exchange.poke,
            buffer_bytes=self._buffer_bytes(stream_buffer_bytes, SOURCE_SHARE),
            mbit=settings.catchup_mbit,
        )
        self.replay_buffer_bytes = self._buffer_bytes(stream_buffer_bytes, SHADOW_SHARE)
        self._info = RankInfo(
            rank=settings.rank,
            node=settings.node,
            links=tuple(Endpoint(rail=r, addr=a, port=p) for r, a, p in self.engine.endpoints()),
            state=self.server.endpoints,
        )
        self.reporter = Reporter(
            settings, self.engine.links, breakpoints.arm_on_order if settings.breakpoints is not None else None
        )
        self._agreement: Agreement | None = None
        self.runtime: RankRuntime = self._make_runtime(state_digest, begin)
        self.breakpoints = self._breakpoints()
        breakpoints.install(self.breakpoints)

    def _nccl_plane(self, parts: Parts, retained: Inputs, reduced: Sequence[torch.Tensor]) -> NcclPlane:
        from ftar_core.training.nccl.plane import NcclPlane

        return NcclPlane(
            parts=parts,
            engine=self.engine,
            plan=self._plan,
            retained=retained,
            reduced=reduced,
            on_reduced=self._reduced_by_nccl,
            on_failed=self._nccl_failed,
            die=lambda reason: self._exit_anyway(RankExit.RESTART, reason, 0.0),
        )

    def _buffer_bytes(self, given: int, share: float) -> int:
        settings = self.settings
        return replay_buffer_bytes(given or settings.replay_buffer, available_bytes(), settings.world_size, share)

    def _make_runtime(self, state_digest: str, begin: Deal) -> RankRuntime:
        settings = self.settings
        extra = [(self.engine.event_fd(), self._engine_events)]

        def machine(digest: str) -> MemberMachine:
            now = time.monotonic()
            return MemberMachine(
                settings.job,
                settings.replica,
                now,
                settings.coordinator_wait_s,
                digest,
                start=begin,
                in_place=settings.world_size == 1,
                restores=self._restores,
                checkpoint_s=self._checkpoint_s,
            )

        if settings.world_size == 1:
            return MemberRuntime(settings, self, machine(state_digest), extra=extra)
        facts = RankFacts(self._plan.hash, state_digest, self._last_step, settings.data_plane)
        team: TeamLeader | TeamFollower
        if settings.rank == 0:
            team = TeamLeader(
                settings,
                self,
                machine,
                info=self._info,
                facts=facts,
                publish=lambda address: rendezvous.publish(settings, address),
                pulse=self._pulse,
                extra=extra,
            )
        else:
            find = lambda: rendezvous.find(settings)  # noqa: E731
            team = TeamFollower(settings, self, info=self._info, facts=facts, find=find, extra=extra)
        self._agreement = Agreement(team.vote, lambda: self.exchange.ended() is not None)
        return team

    def _breakpoints(self) -> breakpoints.Breakpoints | None:
        if self.settings.breakpoints is None:
            return None
        made = breakpoints.Breakpoints(self.settings.rank, (self.plane or self.engine).break_at)
        made.arm(self.settings.breakpoints)
        return made

    def agree(self, mine: Ballot) -> tuple[Ballot, ...]:
        """The ballots of all ranks of the replica, once all have voted; empty if the replica ends instead."""
        return (mine,) if self._agreement is None else self._agreement.reach(mine)

    @property
    def name(self) -> str:
        """For logs: the replica, and the rank where there are several."""
        settings = self.settings
        return settings.replica if settings.world_size == 1 else f"{settings.replica}/{settings.rank}"

    def start(self) -> None:
        """Returns when all ranks of the replica are connected. Raises SettingsError."""
        self.reporter.start()
        self.runtime.start()

    def post(self, event: MemberEvent) -> None:
        self.runtime.post(event)

    def close(self) -> None:
        """End everything, in the order in which nobody uses what is gone already."""
        self._end_noticed.set()
        self.runtime.close()
        self._pulse.stop()
        if self.plane is not None:
            self.plane.close()
        self.engine.close()
        self.server.close()
        self.reporter.close()

    # --- progress, for heartbeats ----------------------------------------------------------------------------------

    def phase(self, phase: Phase, step: int) -> None:
        """What this rank does from now on. Start-up and catching up have the budget of the first steps."""
        budgeted = phase not in BUSY
        self._set_phase(phase, self._ends if phase is self._phase else self._budget_ends() if budgeted else None)
        _, produced, reduced = self._progress
        self._progressed(step, produced, reduced)

    def begin_step(self, step: int) -> None:
        """Forward and backward of a step begin. The first ones of a process may take their time."""
        first, self._first_steps = self._first_steps > 0, self._first_steps - 1
        self._set_phase(Phase.COMPILE if first else Phase.FORWARD, self._budget_ends() if first else None)
        self._progressed(step, 0, 0)

    @contextlib.contextmanager
    def during(self, phase: Phase, budget_s: float) -> Iterator[None]:
        """The training thread does something that may take `budget_s`; then what it did before goes on."""
        before, ends = self._phase, self._ends
        self._set_phase(phase, time.monotonic() + budget_s)
        self._progressed(*self._progress)
        try:
            yield
        finally:
            if self._phase is phase:
                self._set_phase(before, ends)
                self._progressed(*self._progress)

    def _budget_ends(self) -> float:
        return time.monotonic() + self._first_budget_s

    def _set_phase(self, phase: Phase, ends: float | None) -> None:
        self._phase, self._ends = phase, ends
        self._pulse.budget(ends)

    def _progressed(self, step: int, produced: int, reduced: int) -> None:
        self._progress = (step, produced, reduced)
        self._pulse.progress(int(self._phase), step, produced, reduced)

    # --- MemberDelegate, called in the control loop's thread -------------------------------------------------------

    def describe(self) -> tuple[tuple[RankInfo, ...], str, int]:
        return (self._info,), self._plan.hash, self._last_step

    def outline(self) -> Outline:
        return Outline(plans=(self._plan.hash,), parameters=self._plan.outline())

    def welcomed(
        self, cookie: bytes, heartbeat_host: str, heartbeat_port: int, interval_ms: int, incarnation: int
    ) -> None:
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            self.engine.set_incarnation(incarnation)
            self._journal.write("start", {"incarnation": incarnation, "pid": os.getpid(), "plan": self._plan.hash})
        if heartbeat_port:
            self._pulse.beat_to(heartbeat_host, heartbeat_port, cookie, interval_ms)

    def prepare_ring(self, epoch: EpochInfo) -> None:
        self._remember(epoch.id)
        self.exchange.prepare_ring(epoch)
        breakpoints.passes("join-prepare", self._progress[0])

    def discard_ring(self, epoch: EpochId) -> None:
        self.exchange.discard_ring(epoch)

    def enter_epoch(self, order: EnterEpoch) -> None:
        self._remember(order.epoch.id)
        self._rails_down.clear()
        self.exchange.enter_epoch(order)
        breakpoints.passes("epoch", order.step)
        self.reporter.update(
            state="contributing",
            step=order.step,
            term=order.epoch.id.term.number,
            epoch=order.epoch.id.number,
            contributors=order.epoch.names(),
        )
        self._journal.write(
            "epoch",
            {
                "term": order.epoch.id.term.number,
                "epoch": order.epoch.id.number,
                "step": order.step,
                "contributors": list(order.epoch.names()),
                "retry": order.retry,
                "incarnation": self.incarnation,
            },
        )

    def apply_commit(self, order: ApplyCommit) -> None:
        breakpoints.passes("commit-received", order.commit.step)
        self.exchange.apply_commit(order)

    def follow_sources(self, order: FollowSources) -> None:
        self.exchange.follow_sources(order)

    def restore(self) -> None:
        self.exchange.restore()

    def stand_down(self, order: StandDown) -> None:
        log.warning("%s was put out (%s) and comes back without starting again", self.name, order.reason)
        self._journal.write("out", {"incarnation": self.incarnation, "reason": order.reason, "keeps": order.keep})
        self.exchange.stand_down(order)
        self.reporter.update(state="evicted")

    def tell_parts(self, order: TellParts) -> None:
        self.post(Explanation(order.step, order.epoch, self.settings.rank, (), self.parts(order.step)))

    def waiting(self, reason: str) -> None:
        log.warning("%s waits: %s", self.name, reason)
        self.exchange.holding(reason)
        self.reporter.update(state="blocked")

    def end(self, exit_code: int, reason: str) -> None:
        self.exchange.end(exit_code, reason)
        if self._agreement is not None:
            self._agreement.wake()
        if exit_code != RankExit.FINISHED:
            grace_s = self._end_grace_s
            if self.settings.world_size > 1 and exit_code == RankExit.RESTART:
                # The others end too: a collective with them would fail, or never end. What is here is of no use.
                grace_s = 0.0 if self.in_user_code else min(grace_s, BROKEN_GRACE_S)
            threading.Thread(target=self._exit_anyway, args=(exit_code, reason, grace_s), daemon=True).start()

    def _exit_anyway(self, exit_code: int, reason: str, grace_s: float) -> None:
        if not self._end_noticed.wait(grace_s):
            waited = f"the training thread did not notice within {grace_s:g} s, so " if grace_s else ""
            log.critical("%s: %s; %sthe process ends here (exit code %d)", self.name, reason, waited, exit_code)
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(exit_code)

    # --- RankDelegate, of a replica of several ranks

    def called(self, number: int) -> None:
        """The other ranks wait for this one's ballot."""
        self.exchange.poke()

    def agreed(self, number: int, ballots: tuple[Ballot, ...]) -> None:
        if self._agreement is not None:
            self._agreement.agreed(number, ballots)

    # --- the native core -------------------------------------------------------------------------------------------

    def _engine_events(self) -> None:
        for event in self.engine.events():
            kind = event["type"]
            if kind == "reduced":
                if self.plane is not None and self.plane.heard(event["epoch"], event["bucket"]):
                    continue
                self.exchange.reduced(event["epoch"], event["step"], event["bucket"])
            elif kind == "ready":
                prepared = self._epochs.get(event["epoch"])
                if prepared is not None:
                    self.post(RingReady(prepared))
            elif kind == "unreachable":
                epoch = self.exchange.current(event["epoch"])
                if epoch is not None:
                    self.post(PeerUnreachable(event["peer"], epoch.id, event["reason"]))
            elif kind == "rail":
                self._rail_changed(event)
            elif kind == "refused":
                log.warning("a connection from %s is refused: it %s", event["peer"], event["reason"])
            else:  # failed, peer_gone: the coordinator hears of a dead peer itself, and its NewEpoch is the answer
                log.info("%s: %s %s", kind, event.get("peer", ""), event.get("reason", ""))
                if kind == "failed" and self._device is not None and (failure := self._device.failure()):
                    self.end(RankExit.RESTART, f"the GPU failed, so this replica ends: {failure}")
                if kind == "peer_gone":
                    self._expect_verdict(event["epoch"], event["peer"], event["reason"])

    def quiet(self) -> None:
        """Returns when no result is written by what was aborted. Raises FtarError if the device failed."""
        if self.plane is not None:  # the engine's own abort has waited for that
            self.plane.quiet()

    def _reduced_by_nccl(self, epoch: bytes, step: int, bucket: int) -> None:
        self.exchange.reduced(epoch, step, bucket)  # which is made after the plane

    def _nccl_failed(self, key: bytes, slot: int, members: int, reason: str) -> None:
        """NCCL cannot go on in this epoch. If a member is gone the coordinator ends it; if nobody is, this one goes."""
        from ftar_core.training.nccl.choice import patience_s

        patience = patience_s(slot, members)
        log.warning("%s: NCCL failed: %s. Without another epoch it leaves in %g s", self.name, reason, patience)
        self._journal.write("nccl", {"failed": reason, "slot": slot, "members": members})

        def leave() -> None:
            if self.exchange.current(key) is not None and not self._end_noticed.is_set():
                self.end(RankExit.RESTART, f"NCCL failed while all members were there: {reason}")

        timer = threading.Timer(patience, leave)
        timer.daemon = True
        timer.start()

    def _expect_verdict(self, key: bytes, peer: str, reason: str) -> None:
        """If the coordinator still counts on this peer after a while (its process lives, only the link does not), say
        so: the ring of this epoch is broken, and nothing else would end it."""

        def tell() -> None:
            epoch = self.exchange.current(key)
            if epoch is not None and not self._end_noticed.is_set():
                self.post(PeerUnreachable(peer, epoch.id, f"no link any more: {reason}"))

        timer = threading.Timer(VERDICT_S, tell)
        timer.daemon = True
        timer.start()

    def _rail_changed(self, event: Event) -> None:
        epoch = self._epochs.get(event["epoch"])
        self._journal.write(
            "rail",
            {
                "epoch": epoch.number if epoch is not None else None,
                "peer": event["peer"],
                "rail": event["rail"],
                "direction": event["direction"],
                "state": event["state"],
                "active": event["active"],
                "reason": event["reason"],
                "detect_ms": event.get("detect_ms"),
                "t_event": event.get("time"),
            },
        )
        self.reporter.refresh()
        if self.exchange.current(event["epoch"]) is not None:
            self._notify(event["peer"], event["rail"], event["state"], event["reason"])

    def _notify(self, peer: str, rail: str, state: str, reason: str) -> None:
        """Tell the coordinator of a rail that failed, and of its return. When all rails to a peer fail at once it is
        the peer or its host, of which the coordinator hears otherwise."""
        if state == "DOWN" and "by the peer" in reason:
            return  # its process ended, or it has noticed the failure itself and tells
        if state == "DOWN" and (peer, rail) not in self._rails_down:
            if not any(link["peer"] == peer and link["state"] == "UP" for link in self.engine.links()):
                return
            self._rails_down.add((peer, rail))
        elif state == "UP" and (peer, rail) in self._rails_down:
            self._rails_down.discard((peer, rail))
        else:
            return
        self.runtime.tell(RailNotice(peer=peer, rail=rail, state=state, reason=reason, rank=self.settings.rank))

    def _remember(self, epoch: EpochId) -> None:
        self._epochs[epoch_key(self.settings.job, epoch, self.settings.rank)] = epoch
        while len(self._epochs) > EPOCHS_KEPT:
            del self._epochs[next(iter(self._epochs))]


def _engine(settings: Settings, options: Options | None, device: Device | None) -> core.Engine:
    require()
    if options is None:
        options = core.Options()
    if settings.mode is not None:
        options.mode = settings.mode
    try:
        engine = core.Engine(
            settings.job,
            settings.token,
            settings.replica,
            0,
            [(rail.name, rail.device, rail.address) for rail in settings.rails],
            options,
        )
    except (ValueError, OSError) as error:
        raise SettingsError(f"FTAR_RAILS: {error}", hint="compare with: ip -brief address") from None
    if device is not None:
        try:
            engine.use_device(device)
        except RuntimeError as error:
            engine.close()
            raise SettingsError(f"FTAR_REDUCE=device: {error}", hint="set FTAR_REDUCE=host, or unset it") from None
    return engine
