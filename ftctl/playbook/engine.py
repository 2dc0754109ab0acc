"""Carries a playbook out: steady state -> method -> steady state, as often as it says -> clean-up, always.

Whatever ends the method (an action that fails, a stop condition, a time-out, Ctrl-C, a full disk under the journal),
the clean-up follows: the playbook's own, then every fault of this run is taken back, and looked for. If this process is
killed, the agents take its faults back themselves: every fault has a dead-man time that only `keep_alive` renews.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from agents.api.models import EventRecord, StallState
from ftctl.client import events, injection
from ftctl.client.cluster import Agents, Snapshot
from ftctl.durations import show
from ftctl.errors import CliError
from ftctl.exit_codes import ExitCode
from ftctl.playbook import actions, probing
from ftctl.playbook.breaker import RunBreaker, halt_all
from ftctl.playbook.expressions import evaluate
from ftctl.playbook.facts import Facts, look
from ftctl.playbook.journal import Journal, JournalError
from ftctl.playbook.pace import Pace
from ftctl.playbook.rules import rules_of
from ftctl.playbook.running import Incident, Run
from ftctl.playbook.schema import Playbook, Probe

ALLOW = "ftctl faults allow --reason TEXT   # when it is clear what happened"
SAMPLE_S = 0.25
LOOK_S = 5.0
CLEAN_UP_WITHIN_S = 300.0
MAX_EVENTS = 5000  # of a run, in its journal
STEADY_AFTER_S = 60.0  # how long the steady state may take to come back, where its conditions give no time


@dataclass(frozen=True)
class Ended:
    """How a run ended. `how` is one word of ENDINGS."""

    how: str
    reason: str = ""
    hint: str = ""


# how a run can end, before anything is measured -> exit code
ENDINGS: dict[str, ExitCode] = {
    "completed": ExitCode.OK,
    "failed": ExitCode.FAILED,
    "no-steady-state": ExitCode.NO_STEADY_STATE,
    "stopped": ExitCode.STOPPED,
    "in-force": ExitCode.IN_FORCE,
    "unreachable": ExitCode.UNREACHABLE,
    "refused": ExitCode.REFUSED,
    "interrupted": ExitCode.INTERRUPTED,
}


@dataclass
class Result:
    ended: Ended
    incidents: list[Incident]
    pace: Pace
    method_time: tuple[float, float] | None = None  # monotonic seconds
    stalls_before: list[StallState] = field(default_factory=list)  # of before the run, by the coordinator
    leftovers: list[CliError] = field(default_factory=list)


async def play(
    playbook: Playbook,
    agents: Agents,
    journal: Journal,
    *,
    seed: int,
    environment: str,
    say: Callable[[str], None],
    pace: Pace,
    file: str,
) -> Result:
    """Never raises for what happens to the cluster: the Result says it. `file`: what refusals name."""
    dice, rules = Random(f"{seed}/{playbook.name}"), rules_of(playbook, file)
    run = Run(agents, journal, dice, say, f"playbook {playbook.name}", pace, rules)
    result = Result(Ended("failed", "not begun"), run.incidents, pace)
    if environment not in playbook.environments:
        allowed = ", ".join(playbook.environments)
        why = f"this cluster's environment is {environment or 'not named'}, and the playbook is for {allowed}"
        result.ended = Ended("refused", why, "name it with `environment:` in the inventory, or in the playbook")
        return result
    with injection.deferred("interrupted: cleaning up (a moment) ...", agents) as interrupt:
        alive = asyncio.ensure_future(run.keep_alive())
        broken = asyncio.ensure_future(_interrupted(interrupt))
        before: set[events.Key] = set()
        try:
            before = {events.key(event) for event in await _events(agents)}
            with suppress(CliError):
                result.stalls_before = list((await run.job()).stalls)
            look = asyncio.ensure_future(_steady(playbook.steady_state, run, 0.0))
            await asyncio.wait((look, broken), return_when=asyncio.FIRST_COMPLETED)
            if not look.done():
                look.cancel()
                result.ended = Ended("interrupted", f"{interrupt.by}, before anything was injected")
                return result
            if finding := look.result():
                result.ended = Ended("no-steady-state", finding, "ftctl status")
                return result
            start = agents.world.monotonic()
            work = asyncio.ensure_future(_repeats(playbook, run))
            watch = asyncio.ensure_future(_watch(playbook, run))
            result.ended = await _first_end(work, watch, broken, lambda: run.patience(playbook.timeout))
            result.method_time = (start, agents.world.monotonic())
        except JournalError as error:
            result.ended = Ended("failed", str(error), error.hint)
        finally:
            say("cleaning up")
            result.leftovers = await _clean_up(playbook, run)
            for task in (alive, broken):
                task.cancel()
            await asyncio.gather(alive, broken, return_exceptions=True)
            # Those that are new, not those of a time: the clocks of the nodes may be minutes from this one's.
            new = [event for event in await _events(agents) if events.key(event) not in before]
            with suppress(JournalError):
                for event in new[-MAX_EVENTS:]:
                    journal.write("event", event=event.model_dump(mode="json", exclude={"evidence"}))
        if interrupt.set and not (result.ended.how == "interrupted" and result.ended.reason):
            result.ended = Ended("interrupted", interrupt.by)
        if result.leftovers:
            result.ended = Ended("in-force", str(result.leftovers[0]), result.leftovers[0].hint)
    return result


async def _first_end(
    work: asyncio.Future[None],
    watch: asyncio.Future[Ended],
    broken: asyncio.Future[None],
    timeout_s: Callable[[], float],
) -> Ended:
    """Whichever comes first ends the method; the others are cancelled, and waited for."""
    tasks = (work, watch, broken)
    clock = asyncio.get_running_loop().time
    begun = clock()
    try:
        done: set[asyncio.Future[Any]] = set()
        while not done and (left := begun + timeout_s() - clock()) > 0:  # what is left may grow with the machine's pace
            done, _ = await asyncio.wait(tasks, timeout=min(left, LOOK_S), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
        settled = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in settled:
        if isinstance(outcome, JournalError):
            raise outcome
    if broken in done:
        return Ended("interrupted")
    if watch in done:
        outcome = settled[1]
        return outcome if isinstance(outcome, Ended) else _why(outcome)
    if work in done:
        return Ended("completed") if settled[0] is None else _why(settled[0])
    return Ended("failed", f"not done within {show(timeout_s())} (timeout)")


def _why(error: BaseException | str | None) -> Ended:
    if isinstance(error, CliError):
        how = {
            ExitCode.REFUSED: "refused",
            ExitCode.UNREACHABLE: "unreachable",
            ExitCode.IN_FORCE: "in-force",
        }.get(error.code, "failed")
        return Ended(how, str(error), error.hint)
    if isinstance(error, BaseException):
        raise error
    return Ended("failed", str(error))


async def _repeats(playbook: Playbook, run: Run) -> None:
    """The method as often as the playbook says, the steady state after each. Raises CliError."""
    for number in range(playbook.repeat):
        run.repeat, run.began = number, run.agents.world.monotonic()
        if playbook.repeat > 1:
            run.say(f"round {number + 1} of {playbook.repeat}")
        for action in playbook.method:
            run.journal.write("note", text=actions.sentence(action), repeat=number)
            await actions.carry_out(run, action)
        finding = await _steady(playbook.steady_state, run, STEADY_AFTER_S)
        if finding:
            raise CliError("steady state", f"did not come back: {finding}", "ftctl status")


async def _steady(probes: list[Probe], run: Run, within_s: float) -> str:
    """Empty if all probes hold, else the first that does not."""
    for probe in probes:
        patient = probe
        if within_s and getattr(probe, "within", 1.0) == 0.0:
            patient = probe.model_copy(update={"within": within_s})
        finding = await probing.holds(patient, run.agents, run.patience)
        run.journal.write(
            "hypothesis",
            probe=actions.sentence(probe),
            met=finding.met,
            detail=finding.sentence,
            repeat=run.repeat,
            when="after" if within_s else "before",
        )
        if not finding.met:
            return finding.sentence
    return ""


async def _watch(playbook: Playbook, run: Run) -> Ended:
    """Samples the cluster for the report, until a stop condition holds, faults are halted or the breaker opens."""
    since: dict[int, float] = {}
    breaker = RunBreaker(playbook.breaker)
    while True:
        snapshot = await run.snapshot()
        now = run.agents.world.monotonic()
        run.journal.write("sample", **_sample(snapshot))
        run.pace.saw(snapshot.job.step_ms_median if snapshot.job is not None else None)
        for view in snapshot.views():
            if view.halt is not None:
                return Ended(
                    "stopped", f"faults were halted on {view.name} by {view.halt.by}: {view.halt.reason}", ALLOW
                )
        if why := breaker.look(now, snapshot, run.patience(1.0)):
            done = await halt_all(run.agents, f"{why} (breaker of {run.reason})")
            return Ended("stopped", f"the breaker opened: {why}; {done}", ALLOW)
        for index, stop in enumerate(playbook.stop_if):
            finding = evaluate(stop.expect, await look(run.agents, stop.expect, snapshot))
            if not finding.met:
                since.pop(index, None)
            elif now - since.setdefault(index, now) >= run.patience(stop.within):
                return Ended("stopped", f"stop condition {stop.expect}: {finding.sentence}")
        await run.agents.world.sleep(SAMPLE_S)


def _sample(snapshot: Snapshot) -> dict[str, object]:
    """What the report's timeline is drawn from."""
    job = snapshot.job
    facts = Facts(snapshot)
    found: dict[str, object] = {"rails_down": facts("rails.down"), "faults": facts("faults.active")}
    if job is not None:
        losses = [r.loss for r in job.replicas if r.state == "contributing" and r.loss is not None]
        found |= {
            "step": job.step,
            "epoch": f"{job.term}.{job.epoch}",
            "state": job.state,
            "contributors": len(job.contributors),
            "replicas": {replica.name: replica.state for replica in job.replicas},
            "step_ms": job.step_ms_median,
            "loss": sum(losses) / len(losses) if losses else None,
        }
        if job.accounting is not None:  # seconds since the job began, and those of them that went into training
            productive = sum(entry.us for entry in job.accounting.spent if entry.category == "productive")
            found["effective"] = [job.accounting.total_us / 1e6, productive / 1e6]
    return found


async def _interrupted(interrupt: injection.Interrupt) -> None:
    while not interrupt.set:
        await asyncio.sleep(0.05)


async def _clean_up(playbook: Playbook, run: Run) -> list[CliError]:
    """The playbook's own clean-up, then every fault of this run. Returns what may still be in force."""

    async def own() -> None:
        for action in playbook.cleanup:
            try:
                await actions.carry_out(run, action)
            except JournalError:
                pass
            except CliError as error:
                run.say(f"clean-up: {error}")
                with suppress(JournalError):
                    run.journal.write("note", text=f"clean-up: {actions.sentence(action)}: {error}")

    try:
        await asyncio.wait_for(own(), CLEAN_UP_WITHIN_S)
    except asyncio.TimeoutError:
        run.say(f"clean-up: not done within {show(CLEAN_UP_WITHIN_S)}")
    errors: list[CliError] = []
    try:
        errors = await run.revert()
    except JournalError:
        errors = [injection.still_there(fault) for fault in run.live.values()]
    return [*errors, *run.unknown]


async def _events(agents: Agents) -> list[EventRecord]:
    """All that are kept; none when nobody tells."""
    nodes = [node.name for node in agents.inventory.nodes]
    try:
        found, _ = await events.everything(agents, nodes, coordinator=True)
    except CliError:
        return []
    return found
