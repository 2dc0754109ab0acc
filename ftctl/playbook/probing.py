"""Probes and conditions: asked once, or until they hold. A probe's answer is a verdict with its sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx

from ftctl.client.cluster import Agents, Snapshot
from ftctl.durations import show
from ftctl.playbook.expressions import Expression, Finding, evaluate
from ftctl.playbook.facts import look
from ftctl.playbook.schema import Command, Expect, Http, Probe

POLL_S = 0.1
MAX_SAID = 300


async def holds(probe: Probe, agents: Agents, patience: Callable[[float], float] = lambda seconds: seconds) -> Finding:
    """Whether it holds, now or within the time it gives."""
    if isinstance(probe, Expect):
        return await until(probe.expect, agents, patience(probe.within))
    if isinstance(probe, Http):
        return await _repeated(lambda: _http(probe), patience(probe.within))
    return await run(probe)


async def until(
    condition: Expression,
    agents: Agents,
    within_s: float,
    on_look: Callable[[Snapshot], Awaitable[None]] | None = None,
) -> Finding:
    """Looks at the cluster until the condition holds, at most `within_s`; at least once."""
    clock = agents.world.monotonic
    deadline = clock() + within_s
    while True:
        snapshot = await agents.snapshot()
        finding = evaluate(condition, await look(agents, condition, snapshot))
        if finding.met:
            return finding
        if clock() >= deadline:
            late = f" after {show(within_s)}" if within_s else ""
            return Finding(False, f"{finding.sentence}{late}, {condition} was expected")
        if on_look is not None:
            await on_look(snapshot)
        await agents.world.sleep(POLL_S)


async def _repeated(ask: Callable[[], Awaitable[Finding]], within_s: float) -> Finding:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        finding = await ask()
        if finding.met or loop.time() >= deadline:
            return finding
        await asyncio.sleep(0.5)


async def _http(probe: Http) -> Finding:
    try:
        async with httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=probe.timeout) as client:
            async with client.stream("GET", probe.http) as answer:
                status = answer.status_code
    except httpx.HTTPError as error:
        return Finding(False, f"{probe.http}: {error or type(error).__name__}")
    return Finding(status == probe.status, f"{probe.http} answered {status}")


async def run(probe: Command) -> Finding:
    """A command of the user's, without a shell; killed with all it started when its time is over or the run ends."""
    import os
    import signal

    name = probe.command[0]
    try:
        process = await asyncio.create_subprocess_exec(
            *probe.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return Finding(False, f"command {name}: {getattr(error, 'strerror', None) or error}")
    try:
        said, _ = await asyncio.wait_for(process.communicate(), probe.timeout)
    except asyncio.TimeoutError:
        return Finding(False, f"command {name}: not done after {show(probe.timeout)}")
    finally:
        if process.returncode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            await process.wait()
    last = said.decode("utf-8", "replace").strip().splitlines()[-1:] or [""]
    words = "".join(c if c.isprintable() else " " for c in last[0])[:MAX_SAID]
    met = process.returncode == probe.exit
    return Finding(
        met, f"command {name}: exit code {process.returncode}" + (f" ({words})" if words and not met else "")
    )
