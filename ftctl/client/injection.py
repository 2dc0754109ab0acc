"""Injecting and taking back, so that at the end it is known what is in force, whatever happened in between.

An injection whose answer is lost may have happened. It is looked for by its request id, and counts as in force until
the agent says otherwise. One that cannot be found is reverted by its request id all the same: the agent then refuses
the request should it still arrive, so that "nothing was injected" is true for good. Ctrl-C does not cut a request
short, which would only create such a doubt: the answer is waited for (it has a deadline), and what it injected is taken
back before ftctl exits.
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agents.api.models import FaultState, FaultView, InjectRequest, RevertAnswer
from ftctl.client.agent import AgentClient
from ftctl.client.cluster import Agents
from ftctl.errors import AgentRefused, AgentUnreachable, CliError
from ftctl.exit_codes import ExitCode, most_urgent

LOOK_FOR_S = 5.0  # how long a fault with an unknown fate is looked for; an agent that restarts is back within 2 s
LOOK_EVERY_S = 0.25
# How long an agent may answer and not know the request before the request is cancelled there: it may have only begun.
ABSENT_S = 1.0
_UNDER_WAY = (FaultState.ARMED, FaultState.REVERTING)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Set by Ctrl-C (or SIGTERM, SIGHUP) while `deferred` holds it."""

    def __init__(self, *, whole_process: bool) -> None:
        self.set = False
        self.by = "Ctrl-C"  # or the name of another signal
        self.over = False
        self._whole_process = whole_process

    async def closed(self) -> bool:
        """True if a signal came so far. If none did, those that come later are too late: they are ignored until the
        process ends, since an exit code of 130 with a fault in force would be a lie."""
        if self._whole_process:
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        for _ in range(2):  # a signal that came just before is noted by the loop in one of its next turns
            await asyncio.sleep(0)
        if self._whole_process:
            self.over = not self.set
            if self.set:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return self.set


@contextmanager
def deferred(on_first: str, agents: Agents) -> Iterator[Interrupt]:
    """Within it, Ctrl-C is only noted (and `on_first` said); the block looks at `.set` at its end."""
    loop = asyncio.get_running_loop()
    interrupt = Interrupt(whole_process=agents.world.whole_process)

    def note(number: signal.Signals) -> None:
        if not interrupt.set:
            interrupt.by = "Ctrl-C" if number == signal.SIGINT else number.name
            agents.world.say(on_first)
        interrupt.set = True

    taken: list[tuple[signal.Signals, Any]] = []
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            continue  # nohup, or a shell's background job: to be ignored as before
        before = signal.getsignal(number) or signal.SIG_DFL
        try:
            loop.add_signal_handler(number, note, number)
            taken.append((number, before))
        except (ValueError, RuntimeError, NotImplementedError):  # not the main thread, or not Unix
            break
    try:
        yield interrupt
    finally:
        for number, before in taken:
            loop.remove_signal_handler(number)  # which leaves the default, not what was there before
            signal.signal(number, signal.SIG_IGN if interrupt.over else before)


@dataclass
class Outcome:
    """What became of the requests, by node. `faults` are in force; `errors` surely not, unless named in `unknown`.
    `taken_back`: were in force, until it was seen that not all could be; `stuck`: why one of those may still be."""

    faults: dict[str, FaultView] = field(default_factory=dict)
    errors: dict[str, CliError] = field(default_factory=dict)
    unknown: dict[str, InjectRequest] = field(default_factory=dict)
    dry_run: bool = False
    taken_back: dict[str, FaultView] = field(default_factory=dict)
    stuck: list[CliError] = field(default_factory=list)

    @property
    def word(self) -> str:
        """all, none, partial (some nodes surely have it and others surely not), unknown (of some nobody can tell)."""
        if self.unknown:
            return "unknown"
        made = bool(self.faults or self.taken_back)
        return "partial" if made and self.errors else "all" if made else "none"

    def troubled(self) -> list[FaultView]:
        """Faults that are neither a dry run's nor simply active or done: stuck, or between two states for too long."""
        good = (FaultState.ACTIVE, FaultState.DONE)
        return [f for f in self.faults.values() if not self.dry_run and f.state not in good]

    def code(self) -> ExitCode:
        codes = [error.code for error in self.errors.values()]
        codes += [ExitCode.IN_FORCE] * len(self.unknown)
        codes += [ExitCode.IN_FORCE] * len(self.troubled())
        codes += [error.code for error in self.stuck]
        codes += [ExitCode.PARTIAL] * (self.word == "partial" and not self.dry_run)
        return most_urgent(codes)


def new_request_id() -> str:
    return f"ftctl-{uuid.uuid4().hex}"


async def inject(agents: Agents, requests: Mapping[str, InjectRequest]) -> Outcome:
    """Send one request to each node, all at the same time, and find out what became of every one."""

    async def send(client: AgentClient) -> FaultView:
        return await client.inject(requests[client.node])

    outcome = Outcome(dry_run=any(request.dry_run for request in requests.values()))
    for node, answer in (await agents.each(send, requests)).items():
        if isinstance(answer, FaultView):
            outcome.faults[node] = answer
        else:
            outcome.errors[node] = answer
            if _perhaps(answer) and not outcome.dry_run:
                outcome.unknown[node] = requests[node]
    await settle(agents, outcome)
    return outcome


def _perhaps(error: CliError) -> bool:
    """True when the fault may have been injected all the same."""
    if isinstance(error, AgentUnreachable):
        return error.indefinite
    return isinstance(error, AgentRefused) and error.error_code == "in-force"


async def settle(agents: Agents, outcome: Outcome) -> None:
    """Look for the faults of requests without an answer, by request id, for at most LOOK_FOR_S."""

    def found(node: str, fault: FaultView) -> None:
        del outcome.unknown[node]
        if fault.state is FaultState.REVERTED:
            outcome.errors[node] = CliError(
                f"fault {fault.id} ({fault.kind} on {fault.target})", f"is not in force any more: {fault.detail}"
            )
        else:
            del outcome.errors[node]
            outcome.faults[node] = fault

    async def cancel(client: AgentClient, node: str, request: InjectRequest) -> None:
        try:
            answer = await client.revert(request.request_id)
        except AgentRefused as error:
            if error.error_code == "unknown-fault":
                del outcome.unknown[node]
                outcome.errors[node] = CliError(
                    f"agent of {node}", f"{outcome.errors[node].reason}; it knows no such fault: nothing was injected"
                )
        except CliError:
            pass
        else:
            for fault in answer.faults:
                found(node, fault)

    async def look(node: str, request: InjectRequest) -> None:
        client = await agents.client(node)
        clock = agents.world.monotonic
        until = clock() + LOOK_FOR_S
        absent_since: float | None = None
        while node in outcome.unknown and clock() < until:
            try:
                faults = await client.faults()
            except CliError:
                absent_since = None
            else:
                mine = next((fault for fault in faults if fault.request_id == request.request_id), None)
                absent_since = clock() if absent_since is None else absent_since
                if mine is not None and mine.state not in _UNDER_WAY:
                    found(node, mine)
                elif mine is None and clock() - absent_since >= ABSENT_S:
                    await cancel(client, node, request)
            if node in outcome.unknown:
                await agents.world.sleep(LOOK_EVERY_S)

    await asyncio.gather(*(look(node, request) for node, request in list(outcome.unknown.items())))


async def take_back(agents: Agents, outcome: Outcome) -> list[CliError]:
    """Revert everything in the outcome. The errors returned (all with exit code 5) name what may still be in force."""
    failures: list[CliError] = []

    async def undo(node: str, fault: FaultView) -> None:
        client = await agents.client(node)
        error = await _revert_surely(client, fault)
        if error is not None:
            failures.append(error)

    await asyncio.gather(*(undo(node, fault) for node, fault in outcome.faults.items()))
    failures += [in_doubt(node, request) for node, request in outcome.unknown.items()]
    return failures


async def withdraw(agents: Agents, outcome: Outcome) -> None:
    """Not all of it could be made: take back what was. What cannot be taken back stays named in `faults`."""

    async def undo(node: str, fault: FaultView) -> None:
        error = await _revert_surely(await agents.client(node), fault)
        if error is not None:
            outcome.stuck.append(error)
        else:
            outcome.taken_back[node] = outcome.faults.pop(node)

    made = [(node, fault) for node, fault in outcome.faults.items() if not fault.irreversible]
    await asyncio.gather(*(undo(node, fault) for node, fault in made))


async def _revert_surely(client: AgentClient, fault: FaultView) -> CliError | None:
    try:
        answer = await client.revert(fault.id)
    except AgentRefused as error:
        if error.error_code == "unknown-fault":
            return None
        return CliError(f"fault {fault.id}", error.reason, f"ftctl revert {fault.id}", ExitCode.IN_FORCE)
    except CliError as error:
        return CliError(
            f"fault {fault.id} ({fault.kind} on {fault.target})",
            f"may still be in force: {error.reason}",
            f"ftctl revert {fault.id}   (it reverts by itself after its duration)",
            ExitCode.IN_FORCE,
        )
    return next((still_there(f) for f in answer.faults if f.id == fault.id and not is_over(f)), None)


def is_over(fault: FaultView) -> bool:
    return fault.state.over


def still_there(fault: FaultView) -> CliError:
    """A fault that was to be reverted and is not."""
    hint = f"by hand on {fault.node}: {'; '.join(fault.undo)}" if fault.undo else f"ftctl revert {fault.id}"
    return CliError(
        f"fault {fault.id} ({fault.kind} on {fault.target})",
        f"may still be in force, it is {fault.state.value}: {fault.detail or 'no reason given'}",
        hint,
        ExitCode.IN_FORCE,
    )


def in_doubt(node: str, request: InjectRequest) -> CliError:
    return CliError(
        f"{request.kind} on {node}",
        "may be in force: its agent did not say whether it was injected, and does not answer now",
        f"ftctl revert --all --node {node}",
        ExitCode.IN_FORCE,
    )


async def revert_all(agents: Agents, nodes: list[str] | None) -> dict[str, RevertAnswer | CliError]:
    return await agents.each(AgentClient.revert_all, nodes)
