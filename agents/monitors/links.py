"""Links of the processes on this node: answers of their status sockets in, views, events and counters out. Pure.

A process numbers what happened to its links and keeps the last 256 entries; each is told once here, when it is final
(older than the time within which the process merges equal changes), or when the process is gone. What happened before
this agent started is told by the state that is left of it, not as news. A process that stays silent keeps its last
view, with its age; a storm of changes is cut to EVENTS a look, with a count of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agents.api.models import LinkProcessView, LinkRailView, LinkRow
from agents.host.linksockets import LinkAnswer, LinkSocket
from ftar_core.errors import WireError
from ftar_core.wire.linkstatus import STATES, Change, Link, LinkRail, LinkStatus, parse, pid_in

SILENT_S = 3.0  # told then; shorter is a busy machine
EVENTS = 50
MAX_TEXT = 300
COUNTED_RAILS = 64  # names of rails come from outside, and every one is a label of a metric
OTHER = "other"
NO_WAY = ("DOWN", "PROBING", "SILENT")


class Told(NamedTuple):
    """An event. `rail` is the NIC or rail that it is about, possibly empty; `age_s`: how long ago it happened; `pid` is
    the process, 0 for several."""

    kind: str
    rail: str
    reason: str
    age_s: float = 0.0
    pid: int = 0


@dataclass
class Counters:
    """Since the agent started, over all processes: by (kind of process, rail)."""

    bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    losses: dict[tuple[str, str], int] = field(default_factory=dict)
    resumes: dict[str, int] = field(default_factory=dict)

    def add(self, where: dict[tuple[str, str], int], kind: str, rail: str, count: int) -> None:
        key = (kind, rail)
        if key not in where and len(where) >= COUNTED_RAILS:
            key = (kind, OTHER)
        where[key] = where.get(key, 0) + count


@dataclass
class _Process:
    pid: int
    uid: int
    answered_s: float
    status: LinkStatus | None = None
    problem: str = ""
    told_problem: str = ""
    told_silence: bool = False
    seq: int = 0  # of the last change that was told
    waiting: tuple[Change, ...] = ()  # seen, not final yet
    counted: dict[int, Link] = field(default_factory=dict)

    @property
    def who(self) -> str:
        return _who(self.pid, self.status)


def _who(pid: int, status: LinkStatus | None) -> str:
    if status is None:
        return f"process {pid}"
    rank = f", rank {printable(status.rank)}" if status.rank else ""
    name = f" {printable(status.name)}" if status.kind == "ring" else ""
    return f"process {pid} ({status.kind}{name}{rank})"


def printable(text: str) -> str:
    """A text of a process without what could rewrite a terminal, and bounded."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_TEXT])


class LinkBook:
    """`take` wants to be called from one thread; the views are values that others may read."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._processes: dict[LinkSocket, _Process] = {}
        self.counters = Counters()

    def take(self, now: float, answers: Sequence[LinkAnswer], lives: Callable[[int], bool]) -> list[Told]:
        """`now` monotonic seconds; `answers` of all sockets that there are. Returns what is news."""
        told: list[Told] = []
        there = {answer.socket for answer in answers}
        for socket in [socket for socket in self._processes if socket not in there]:
            told += self._gone(self._processes.pop(socket), lives)
        for answer in answers:
            told += self._one(now, answer, lives)
        if len(told) > EVENTS:
            more = Told("link.storm", "", f"{len(told) - EVENTS} more changes of links within one look: ftctl links")
            told = [*told[:EVENTS], more]
        return told

    def _one(self, now: float, answer: LinkAnswer, lives: Callable[[int], bool]) -> Iterator[Told]:
        process = self._processes.get(answer.socket)
        if process is None:
            pid = answer.pid if answer.pid > 0 else pid_in(answer.socket.name) or 0
            if answer.problem and (answer.uid == -1 or not lives(pid)):
                return  # it was just closing, or a fork inherited the socket of a process that is dead
            process = self._processes[answer.socket] = _Process(pid, answer.uid, now)
        status: LinkStatus | None = None
        problem = answer.problem
        if not problem:
            try:
                status = parse(answer.data)
            except WireError as error:
                problem = printable(str(error))
                process.answered_s = now
        process.problem = problem
        if status is None:
            yield from self._unread(now, process, answered=not answer.problem)
            return
        first = process.status is None
        process.answered_s, process.status, process.told_problem = now, status, ""
        if process.told_silence:
            process.told_silence = False
            yield Told("link.process", "", f"{process.who} answers again", pid=process.pid)
        self._count(process, status)
        yield from self._changes(now, process, status, first)

    def _unread(self, now: float, process: _Process, *, answered: bool) -> Iterator[Told]:
        if answered:
            if process.told_problem != process.problem:
                process.told_problem = process.problem
                yield Told("link.unreadable", "", f"{process.who}: {process.problem}", pid=process.pid)
        elif not process.told_silence and now - process.answered_s >= SILENT_S:
            process.told_silence = True
            yield Told(
                "link.process", "", f"{process.who} does not answer: {process.problem}; is it stopped?", pid=process.pid
            )

    def _gone(self, process: _Process, lives: Callable[[int], bool]) -> Iterator[Told]:
        for change in process.waiting:
            yield from self._tell(process, change)
        if process.status is not None:
            how = "closed its links" if lives(process.pid) else "ended"
            cut_off = sum(all(rail.state in NO_WAY for rail in link.rails) for link in process.status.links)
            if cut_off:
                how += (
                    f"; when last seen, {cut_off} of its {len(process.status.links)} connections had no rail that works"
                )
            yield Told("link.process", "", f"{process.who} {how}", pid=process.pid)

    def _changes(self, now: float, process: _Process, status: LinkStatus, first: bool) -> Iterator[Told]:
        changes = [change for change in status.changes if change.seq > process.seq]
        if first:
            old = [change for change in changes if now - change.age_s < self._started_s]
            if old:
                process.seq = old[-1].seq
            yield from _left_behind(process, status, [change for change in changes if change not in old])
            changes = changes[len(old) :]
        elif changes and changes[0].seq > process.seq + 1:
            lost = changes[0].seq - process.seq - 1
            yield Told("link.storm", "", f"{process.who}: {lost} changes came too fast to be told", pid=process.pid)
        final = [change for change in changes if change.age_s * 1000 >= status.merge_ms]
        process.waiting = tuple(change for change in changes if change.age_s * 1000 < status.merge_ms)
        for change in final:
            process.seq = change.seq
            yield from self._tell(process, change)

    def _tell(self, process: _Process, change: Change) -> Iterator[Told]:
        status = process.status
        if status is None:
            return
        if change.kind == "rail" and change.to == "DOWN":
            self.counters.add(self.counters.losses, status.kind, printable(change.rail), change.links)
        device = next((port.device for port in status.rails if port.name == change.rail), "")
        kind = "link.rail" if change.kind in ("rail", "moved") else "link.peer"
        yield Told(
            kind,
            printable(device or change.rail),
            f"{process.who}: {in_words(status, change)}",
            change.age_s,
            process.pid,
        )

    def _count(self, process: _Process, status: LinkStatus) -> None:
        links = {link.id: link for link in status.links}
        resumes, moved = 0, dict.fromkeys(range(len(status.rails)), 0)
        for number, link in links.items():
            before = process.counted.get(number)
            resumes += max(0, link.resumes - (before.resumes if before else 0))
            for slot, rail in enumerate(link.rails):
                known = before.rails[slot].bytes if before and slot < len(before.rails) else 0
                moved[rail.rail] += max(0, rail.bytes - known)
        process.counted = links
        self.counters.resumes[status.kind] = self.counters.resumes.get(status.kind, 0) + resumes
        for index, port in enumerate(status.rails):
            self.counters.add(self.counters.bytes, status.kind, printable(port.name), moved[index])

    def views(self, now: float) -> list[LinkProcessView]:
        return [_view(process, now) for process in self._sorted()]

    def rows(self, *, pid: int | None = None, rail: str = "", state: str = "", each: bool = False) -> list[LinkRow]:
        """By process, peer, direction and rail; `rail` names a rail or its device."""
        found: list[LinkRow] = []
        for process in self._sorted():
            if process.status is not None and pid in (None, process.pid):
                found += _rows(process.pid, process.status, each)
        return [
            row
            for row in found
            if (not rail or rail in (row.rail, row.device)) and (not state or row.state == state.upper())
        ]

    def _sorted(self) -> list[_Process]:
        processes = [process for process in list(self._processes.values()) if process.status or process.problem]
        return sorted(processes, key=lambda process: (process.pid, process.answered_s))


def in_words(status: LinkStatus, change: Change) -> str:
    """The sentence why: "4 connections to 10.1.0.2 lost rail0: no carrier (noticed after 2 ms)"."""
    peer = _peer_in_words(status, change.peer) if change.peer else "several peers"
    word = {"out": " to", "in": " from"}.get(change.direction, " with")
    many = f"{change.links} connections" if change.links != 1 else "a connection"
    links, rail, reason = f"{many}{word} {peer}", printable(change.rail), printable(change.reason)
    if change.kind == "moved":
        return f"{links} {_verb(change, 'sends', 'send')} over {rail} now: {reason}"
    if change.kind == "dead":
        return f"{links}: no rail works: {reason}"
    if change.kind == "back":
        return f"{links}: a rail works again"
    if change.kind == "unreachable":
        return f"{links}: {reason}" + ("; given up" if status.kind == "nccl" else "")
    if change.kind == "over":
        return f"{links}: the peer {reason}"
    if change.to == "DOWN":
        noticed = f" (noticed after {change.detect_ms:.0f} ms)" if change.detect_ms >= 0 else ""
        return f"{links} lost {rail}: {reason}{noticed}"
    if change.to == "HOLD":
        return f"{links} {_verb(change, 'has', 'have')} {rail} back, in hold-down: {reason}"
    return f"{links}: {rail} is {printable(change.to)}: {reason}"


def _verb(change: Change, one: str, many: str) -> str:
    return one if change.links == 1 else many


def _peer_in_words(status: LinkStatus, peer: str) -> str:
    """A ring's peer is a replica; one of the plugin has an address and a number nobody knows."""
    if status.kind == "ring":
        return printable(peer)
    addresses = (rail.address for link in status.links if link.peer == peer for rail in link.rails)
    return printable(next((address for address in addresses if address), peer))


def _left_behind(process: _Process, status: LinkStatus, news: Sequence[Change]) -> Iterator[Told]:
    """What is bad already when the process is first seen, and not about to be told."""
    for view in _view(process, process.answered_s).rails:
        about = any(change.rail == view.rail for change in news)
        if not about and view.state == "DOWN":
            count = view.states.get("DOWN", 0)
            many = f"{count} of {view.links} connections are without {view.rail}: {view.reason}"
            yield Told("link.rail", view.device or view.rail, f"{process.who}: {many}", pid=process.pid)


def worst(rails: Iterable[LinkRail]) -> LinkRail:
    """The one in the worst state; among equals the one that has been in it for the longest time."""
    return min(rails, key=lambda rail: (STATES.index(rail.state), -rail.since_s))


def _view(process: _Process, now: float) -> LinkProcessView:
    status = process.status
    silent_s = max(0.0, now - process.answered_s)
    if status is None:
        return LinkProcessView(
            pid=process.pid, uid=process.uid, kind="", job="", name="", rank="", mode="", age_s=0.0,
            silent_s=silent_s, note=process.problem,
        )  # fmt: skip
    links = status.links
    return LinkProcessView(
        pid=process.pid,
        uid=process.uid,
        kind=status.kind,
        job=printable(status.job),
        name=printable(status.name),
        rank=printable(status.rank),
        mode=printable(status.mode),
        age_s=status.age_s + silent_s,
        silent_s=silent_s,
        note=process.problem,
        links=status.links_total,
        left_out=status.left_out,
        peers=len({link.peer for link in links}),
        resumes=sum(link.resumes for link in links),
        rails=[_rail(status, index, links) for index in range(len(status.rails))],
    )


def _rail(status: LinkStatus, index: int, links: Sequence[Link]) -> LinkRailView:
    port = status.rails[index]
    own: list[LinkRail] = []
    moved: dict[str, int] = {}
    for link in links:
        own += [rail for rail in link.rails if rail.rail == index]
        if link.rails and link.rails[0].rail == index and not link.rails[0].active:
            carrier = next((rail for rail in link.rails if rail.active), None)
            if carrier is not None:
                name = printable(status.rails[carrier.rail].name)
                moved[name] = moved.get(name, 0) + 1
    view = LinkRailView(
        rail=printable(port.name), device=printable(port.device), address=printable(port.address), links=len(own)
    )
    if not own:
        return view
    first = worst(own)
    counted = {state: sum(rail.state == state for rail in own) for state in STATES}
    detected = max(rail.detect_ms for rail in own)
    return view.model_copy(
        update={
            "states": {state: count for state, count in counted.items() if count},
            "up": counted["UP"],
            "state": first.state,
            "reason": printable(first.reason),
            "since_s": first.since_s,
            "active": sum(rail.active for rail in own),
            "moved": moved,
            "flaps": max(rail.flaps for rail in own),
            "bytes": sum(rail.bytes for rail in own),
            "hold_left_s": max(rail.hold_left_ms for rail in own) / 1000,
            "detect_ms": detected if detected >= 0 else None,
            "retransmits": sum(rail.retransmits for rail in own),
        }
    )


def _rows(pid: int, status: LinkStatus, each: bool) -> Iterator[LinkRow]:
    groups: dict[tuple[str, str, int, int], list[tuple[Link, LinkRail]]] = {}
    for link in status.links:
        for rail in link.rails:
            key = (link.peer, link.direction, link.id if each else 0, rail.rail)
            groups.setdefault(key, []).append((link, rail))
    for (peer, direction, number, index), group in sorted(groups.items()):
        rails = [rail for _, rail in group]
        first, port = worst(rails), status.rails[index]
        detected = max(rail.detect_ms for rail in rails)
        yield LinkRow(
            pid=pid,
            kind=status.kind,
            rank=printable(status.rank),
            name=printable(status.name),
            peer=printable(peer),
            direction=printable(direction),
            rail=printable(port.name),
            device=printable(port.device),
            address=printable(first.address),
            link=number if each else None,
            links=len(group),
            up=sum(rail.state == "UP" for rail in rails),
            state=first.state,
            reason=printable(first.reason),
            since_s=first.since_s,
            active=sum(rail.active for rail in rails),
            flaps=max(rail.flaps for rail in rails),
            resumes=sum(link.resumes for link, _ in group),
            bytes=sum(rail.bytes for rail in rails),
            hold_left_s=max(rail.hold_left_ms for rail in rails) / 1000,
            detect_ms=detected if detected >= 0 else None,
            retransmits=sum(rail.retransmits for rail in rails),
        )
