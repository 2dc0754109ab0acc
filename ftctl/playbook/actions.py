"""What each action of a playbook does. An action that cannot do it raises CliError with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from agents.api.models import JobState, ReplicaAction
from ftctl.client import injection, replicas
from ftctl.client.cluster import Snapshot
from ftctl.durations import show
from ftctl.errors import CliError
from ftctl.exit_codes import ExitCode
from ftctl.playbook import probing
from ftctl.playbook import schema as s
from ftctl.playbook.asking import aim_of, request_for
from ftctl.playbook.expressions import Expression
from ftctl.playbook.moments import LATE_S, Moment
from ftctl.playbook.running import ActionFailed, Run
from ftctl.playbook.selecting import Aim, pick_replica

STEP_POLL_S = 0.02  # of the job's step, while a fault waits for it: a step of the lab takes ten times as long
STEPS_POLL_S = 0.15
CLOCK_S = 1.0  # between two looks at a clock that may be set


async def carry_out(run: Run, action: s.Action) -> None:
    """Raises CliError when it fails; cancelled, it leaves nothing undone that is not in `run.live`."""
    await _CARRY[type(action)](run, action)


def sentence(action: Any) -> str:
    """The action in one line."""
    verb = next(verb for verb, kind in s.VERBS.items() if type(action) is kind)
    if isinstance(action, s.Fault):
        with_ = "".join(f" {name}={value}" for name, value in action.params.items())
        at = f" {_when(action.at)}" if isinstance(action, s.Inject) and action.at else ""
        return f"inject {action.inject}{with_} for {show(action.duration)}{at}"
    if isinstance(action, s.Parallel):
        return "at the same time: " + "; ".join(map(sentence, action.parallel))
    if isinstance(action, s.Storm):
        mix = ", ".join(f"{fault.inject} ({fault.weight:g})" for fault in action.storm.mix)
        return f"storm of {show(action.storm.lasts)}, a fault every {show(action.storm.mtbf)} on average: {mix}"
    if isinstance(action, s.Sleep):
        return f"sleep {show(action.sleep)}"
    if isinstance(action, s.Command):
        return f"command {' '.join(action.command)}"
    if isinstance(action, s.Steps):
        return f"{action.steps} steps"
    return f"{verb} {getattr(action, verb)}"


def _when(at: s.At) -> str:
    if at.step is not None:
        return f"at step {at.step}"
    if at.time is not None:
        return f"at {at.time}"
    return f"when {at.when}" if at.when is not None else f"after {show(at.after or 0.0)}"


async def wait_for(run: Run, at: s.At | None) -> None:
    """Until the moment an action asks for. Raises ActionFailed when it does not come."""
    if at is None:
        return
    if at.after is not None:
        await run.agents.world.sleep(at.after)
    elif at.time is not None:
        await _moment(run, at.time)
    elif at.when is not None:
        await _until(run, at.when, at.within)
    else:
        job = await run.job()
        goal = job.step + int(at.step[1:]) if isinstance(at.step, str) else int(at.step or 0)
        await _step(run, lambda: goal, at.within, STEP_POLL_S)


async def _moment(run: Run, moment: Moment) -> None:
    """One of the calendar by this machine's clock, which may be set meanwhile. One that is over is not now: that would
    be another experiment."""
    world = run.agents.world
    clock = world.monotonic if moment.unix is None else world.unix_time
    left = moment.left(began=run.began, now=clock())
    if left < -LATE_S:
        since = "after the method began" if moment.unix is None else "by the clock of this machine"
        raise ActionFailed(f"at {moment}", f"is over: {show(-left)} ago {since}", "a later time, or `after`")
    while left > 0:
        await world.sleep(min(left, CLOCK_S))
        left = moment.left(began=run.began, now=clock())


async def _until(run: Run, condition: Expression, within_s: float) -> None:
    finding = await probing.until(condition, run.agents, run.patience(within_s))
    if not finding.met:
        raise ActionFailed("", finding.sentence)


async def _step(run: Run, goal: Callable[[], int], within_s: float, poll_s: float) -> None:
    clock = run.agents.world.monotonic
    within_s = run.patience(within_s)
    deadline = clock() + within_s
    job: JobState | None = None
    trouble: CliError | None = None
    while job is None or job.step < goal():
        if clock() >= deadline:
            seen = f"the job is at step {job.step}" if job else str(trouble)
            raise ActionFailed("job", f"step {goal()} was not reached within {show(within_s)}; {seen}", "ftctl status")
        if job is not None and job.state in ("finished", "stopped"):
            raise ActionFailed(
                "job", f"is {job.state} at step {job.step} ({job.reason}), so step {goal()} will not come"
            )
        if job is not None or trouble is not None:
            await run.agents.world.sleep(poll_s)
        try:
            job = await run.job()
        except CliError as error:  # a coordinator that starts again is waited for
            trouble = error


# --- faults ----------------------------------------------------------------------------------------------------------


async def _inject(run: Run, action: s.Inject) -> None:
    aim = await aim_of(run.agents, action, await run.snapshot(), run.rng)
    await wait_for(run, action.at)
    fault = await inject(run, action, aim, action.reason)
    if action.name and fault:
        run.named.setdefault(action.name, []).append(fault)


async def inject(run: Run, fault: s.Fault, aim: Aim, reason: str) -> str:
    """The fault's id. A request under way is not cut short: whether it injected must be known."""
    if not aim.node:
        raise ActionFailed(f"inject {fault.inject}", "where? the target names neither a node nor a replica")
    request = run.telling(await request_for(run.agents, fault, aim, reason or run.reason, run.rules), aim.node)
    incident = run.begin(fault.inject, aim)
    sent = asyncio.ensure_future(injection.inject(run.agents, {aim.node: request}))
    cancelled = False
    while not sent.done():
        try:
            await asyncio.shield(sent)
        except asyncio.CancelledError:
            cancelled = True  # once more round: it has a deadline of its own
    outcome = sent.result()
    run.took(outcome)
    if aim.node in outcome.errors and aim.node not in outcome.unknown:
        run.over(request.request_id)
    incident.reached = run.agents.world.monotonic() - incident.mono
    error = outcome.errors.get(aim.node)
    made = outcome.faults.get(aim.node)
    incident.fault = made.id if made else ""
    run.journal.write(
        "action",
        what="inject",
        incident=incident.number,
        fault=incident.fault,
        fault_kind=fault.inject,
        target=str(aim),
        params=request.params,
        state=made.state.value if made else "",
        detail=made.detail if made else str(error),
        took_s=round(incident.reached, 6),
    )
    if cancelled:
        raise asyncio.CancelledError
    if error is not None:
        raise error
    if trouble := outcome.troubled():
        raise injection.still_there(trouble[0])
    run.say(f"{fault.inject} {aim}: {made.detail or made.state.value}" if made else f"{fault.inject} {aim}")
    return incident.fault


async def _revert(run: Run, action: s.Revert) -> None:
    await wait_for(run, action.at)
    ids = None if action.revert == "all" else run.named.get(action.revert, [])
    errors = await run.revert(ids)
    if errors:
        raise errors[0]
    run.say("faults are taken back" if ids is None else f"{action.revert} is taken back")


async def _storm(run: Run, action: s.Storm) -> None:
    """Faults that are refused, by a guard or because no target is left, are the storm's limits, not its failure."""
    plan, clock = action.storm, run.agents.world.monotonic
    end = clock() + plan.lasts
    weights = [fault.weight for fault in plan.mix]
    while True:
        pause = run.rng.expovariate(1.0 / plan.mtbf)
        if clock() + pause >= end:
            await run.agents.world.sleep(max(0.0, end - clock()))
            return
        await run.agents.world.sleep(pause)
        fault = run.rng.choices(plan.mix, weights)[0]
        try:
            aim = await aim_of(run.agents, fault, await run.snapshot(), run.rng)
            await inject(run, fault, aim, "")
        except CliError as error:
            if run.unknown or error.code is ExitCode.IN_FORCE:
                raise
            run.journal.write("note", text=f"{fault.inject}: {error}")
            run.say(f"{fault.inject}: {error}")


# --- replicas --------------------------------------------------------------------------------------------------------


async def _member(run: Run, verb: str, who: str, action: Any, goal: str, *, rejoin: bool = True) -> None:
    await wait_for(run, action.at)
    snapshot = await run.snapshot()
    name = pick_replica(who, snapshot, run.rng)
    before = replicas.find(snapshot.job, name) if snapshot.job else None
    incident = run.begin(verb, Aim(replica=name))
    request = ReplicaAction(reason=action.reason or run.reason, rejoin=rejoin)
    answer = await replicas.act(run.agents, snapshot, verb, name, request)
    run.journal.write("action", what=verb, incident=incident.number, target=name, detail=answer.text)
    if action.wait:
        life = before.incarnation if before else 0

        def there(state: Any) -> bool:
            gone = verb == "evict" and (state.state in ("evicted", "unreachable") or state.incarnation > life)
            return state.state == goal or gone

        await replicas.until(
            run.agents, name, there, goal=goal, timeout_s=run.patience(action.timeout), or_spare=verb == "rejoin"
        )
    run.say(f"{verb} {name}: {answer.text or 'done'}")


async def _drain(run: Run, action: s.Drain) -> None:
    await _member(run, "drain", action.drain, action, "drained")


async def _evict(run: Run, action: s.Evict) -> None:
    await _member(run, "evict", action.evict, action, "evicted", rejoin=action.rejoin)


async def _rejoin(run: Run, action: s.Rejoin) -> None:
    await _member(run, "rejoin", action.rejoin, action, "contributing")


# --- waiting and asking ----------------------------------------------------------------------------------------------


async def _wait(run: Run, action: s.Wait) -> None:
    await _until(run, action.wait, action.timeout)
    run.say(f"{action.wait}")


async def _ensure(run: Run, action: s.Ensure) -> None:
    wanted = {
        c.fact.removeprefix("replica.").removesuffix(".state")
        for c in action.ensure.comparisons
        if c.fact.startswith("replica.") and c.fact.endswith(".state") and (c.op, c.value) == ("==", "contributing")
    }
    asked: set[tuple[str, int]] = set()

    async def bring_back(snapshot: Snapshot) -> None:
        for state in snapshot.job.replicas if snapshot.job else ():
            if (
                state.name in wanted
                and state.state in ("drained", "evicted")
                and (state.name, state.incarnation) not in asked
            ):
                asked.add((state.name, state.incarnation))
                try:
                    await replicas.act(run.agents, snapshot, "rejoin", state.name, ReplicaAction(reason=run.reason))
                except CliError as error:
                    run.journal.write("note", text=f"rejoin {state.name}: {error}")

    finding = await probing.until(action.ensure, run.agents, run.patience(action.timeout), bring_back)
    if not finding.met:
        raise ActionFailed("", finding.sentence)


async def _steps(run: Run, action: s.Steps) -> None:
    job = await run.job()
    await _step(run, lambda: job.step + action.steps, action.timeout, STEPS_POLL_S)


async def _sleep(run: Run, action: s.Sleep) -> None:
    await run.agents.world.sleep(action.sleep)


async def _probe(run: Run, action: Any) -> None:
    finding = await probing.holds(action, run.agents, run.patience)
    run.journal.write("action", what="probe", target=sentence(action), met=finding.met, detail=finding.sentence)
    if not finding.met:
        raise ActionFailed("", finding.sentence)


async def _parallel(run: Run, action: s.Parallel) -> None:
    """All of them; what one fails at does not cut the others short, since that would leave things half done. Some done
    and some not is said as what it is: the run ends, and its clean-up takes back what was made."""
    results = await asyncio.gather(*(carry_out(run, inner) for inner in action.parallel), return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    done = [sentence(inner) for inner, result in zip(action.parallel, results, strict=True) if result is None]
    for result in failed:
        if isinstance(result, CliError) and done:
            reason = f"{result.reason} (partial: done at the same time: {'; '.join(done)})"
            run.journal.write("note", text=f"partial: {result}; done: {'; '.join(done)}", repeat=run.repeat)
            raise CliError(result.thing, reason, result.hint, result.code)
        raise result


_CARRY: dict[type[Any], Callable[[Run, Any], Awaitable[None]]] = {
    s.Inject: _inject,
    s.Revert: _revert,
    s.Drain: _drain,
    s.Evict: _evict,
    s.Rejoin: _rejoin,
    s.Wait: _wait,
    s.Ensure: _ensure,
    s.Steps: _steps,
    s.Sleep: _sleep,
    s.Expect: _probe,
    s.Command: _probe,
    s.Http: _probe,
    s.Parallel: _parallel,
    s.Storm: _storm,
}
