"""Events of all agents and of the coordinator, merged.

Every source numbers its own events, and begins again when it is started again (`boot` changes then). An event may reach
us twice, from the coordinator and from an agent that heard of it: the same source, number and time are the same event.
Clocks of different machines differ by some milliseconds, so the merged order is that of the clocks and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from agents.api.models import EventRecord, EventsAnswer
from ftctl.client.agent import AgentClient
from ftctl.client.cluster import Agents
from ftctl.errors import AgentRefused, CliError

PAGE = 1000
MAX_PAGES = 100  # of one source; an agent keeps fewer events than this
LONG_POLL_S = 10.0  # agents allow 30; it bounds how late a restart between two polls is noticed
COORDINATOR_POLL_S = 0.5
RETRY_S = 1.0
MAX_REMEMBERED = 100_000

Key = tuple[str, int, float]


def key(event: EventRecord) -> Key:
    return (event.source, event.seq, event.time)


def merge(batches: Iterable[Iterable[EventRecord]]) -> list[EventRecord]:
    """By time, each event once."""
    unique = {key(event): event for batch in batches for event in batch}
    return sorted(unique.values(), key=lambda event: (event.time, event.source, event.seq))


class Seen:
    """Which events were printed already; bounded, the oldest are forgotten first."""

    def __init__(self) -> None:
        self._keys: dict[Key, None] = {}

    def first_time(self, event: EventRecord) -> bool:
        if key(event) in self._keys:
            return False
        self._keys[key(event)] = None
        if len(self._keys) > MAX_REMEMBERED:
            del self._keys[next(iter(self._keys))]
        return True


async def everything(
    agents: Agents, nodes: list[str], *, coordinator: bool
) -> tuple[list[EventRecord], list[CliError]]:
    """All events that are still kept, and the sources that did not answer."""

    async def of_agent(client: AgentClient) -> list[EventRecord]:
        return await _pages(lambda after: client.events(after, limit=PAGE))

    async def of_job() -> list[EventRecord] | CliError:
        if not coordinator:
            return []
        try:
            return await agents.any_agent(lambda client: _pages(client.job_events))
        except CliError as error:
            return [] if isinstance(error, AgentRefused) and error.error_code == "no-coordinator" else error

    answers, job = await asyncio.gather(agents.each(of_agent, nodes), of_job())
    every = [*answers.values(), job]
    errors = [answer for answer in every if isinstance(answer, CliError)]
    return merge(answer for answer in every if not isinstance(answer, CliError)), errors


async def _pages(ask: Callable[[int], Awaitable[EventsAnswer]]) -> list[EventRecord]:
    found: list[EventRecord] = []
    after = 0
    for _ in range(MAX_PAGES):
        answer = await ask(after)
        found += answer.events
        if not answer.events or answer.events[-1].seq >= answer.last or answer.events[-1].seq <= after:
            break
        after = answer.events[-1].seq
    return found


async def follow(
    agents: Agents,
    nodes: list[str],
    emit: Callable[[EventRecord], None],
    *,
    coordinator: bool,
    since: float,
    say: Callable[[str], None] | None = None,
) -> None:
    """Emit events as they come, those from `since` (Unix seconds) on first. Runs until it is cancelled.

    A source that goes away is said once (on stderr, or through `say`) and asked again until it is back: what it kept
    meanwhile is then emitted.
    """
    seen = Seen()
    tell = say or agents.world.say

    def take(events: list[EventRecord]) -> None:
        for event in merge([events]):
            if event.time >= since and seen.first_time(event):
                emit(event)

    async def pump(name: str, ask: Callable[[int, float], Awaitable[EventsAnswer]], pause_s: float) -> None:
        after, boot, silent, wait_s = 0, "", False, LONG_POLL_S
        while True:
            asked = agents.world.monotonic()
            try:
                answer = await ask(after, wait_s)
            except CliError as error:
                if not silent:
                    tell(f"{name}: {error.reason} (trying again)")
                # It may come back with its numbers begun again: that must be seen at once, not after a long poll.
                silent, wait_s = True, 0.0
                await agents.world.sleep(RETRY_S)
                continue
            if silent:
                tell(f"{name}: back")
            # An empty answer before its time comes from an agent that is being stopped.
            early = not answer.events and agents.world.monotonic() - asked < wait_s * 0.9
            silent, wait_s = False, 0.0 if early else LONG_POLL_S
            if boot and answer.boot != boot:
                boot, after, wait_s = answer.boot, 0, 0.0
                continue  # numbering began again: from the start of the new life
            boot = answer.boot
            take(answer.events)
            after = max([after, *(event.seq for event in answer.events)])
            if not answer.events or pause_s:
                await agents.world.sleep(pause_s or 0.01)

    async def of_agent(node: str) -> None:
        client = await agents.client(node)
        await pump(f"agent of {node}", lambda after, wait_s: client.events(after, limit=PAGE, wait_s=wait_s), 0.0)

    async def of_job() -> None:
        await pump(
            "coordinator",
            lambda after, _wait_s: agents.any_agent(lambda client: client.job_events(after)),
            COORDINATOR_POLL_S,
        )

    # What is there already comes in the order of time; after that, as it arrives.
    earlier, _ = await everything(agents, nodes, coordinator=coordinator)
    take(earlier)
    await asyncio.gather(*map(of_agent, nodes), *([of_job()] if coordinator else []))
