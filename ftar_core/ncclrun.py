"""A job of processes that move bytes through the NCCL plugin as NCCL does, on machines without GPUs: one a rank.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=7620 python -m ftar_core.ncclrun --rails eth1,eth2

The environment is torchrun's; the plugin is set up by `ftar_core.nccl.enable`, loaded, and driven through its C
interface (ncclabi.py). Every rank sends to every other over `--channels` connections, in rounds: a burst of messages of
several sizes, then a pause. A byte's value depends on the connection, the message and its place in it, and the receiver
looks at every one, at what lies behind the message, and at the buffer once more before it is used again.

The ranks exchange handles over TCP at rank 0, as NCCL does over its bootstrap, and keep those connections: when one
closes, a rank is gone and the job cannot go on. Exit codes (ftar_core/wire/exits.py): 0 all rounds done, or SIGTERM;
1 a byte was wrong; 2 wrong settings; 75 a peer is gone: start again.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftar_core import nccl
from ftar_core.errors import FtarError, SettingsError
from ftar_core.ncclabi import REMOTE, Plugin, PluginError
from ftar_core.ncclenv import plugin_path
from ftar_core.wire.exits import RankExit

WRONG = 1
SIZES = (0, 8, 4097, 65_536, 262_147)  # bytes; one of each a burst and a connection
WINDOW = 8  # requests in flight a connection
GUARD = 64  # bytes behind each receive that must stay as they were
CANARY = 0xEE
TAPE_BYTES = 1 << 21
REPORT_S = 0.5
IDLE_S, BUSY_S = 0.002, 0.0002  # sleep when nothing moved: without, and with messages on their way
MEET_S = 120.0  # for all ranks to come; a node may be starting still
HELLO_S = 5.0
MAX_LINE = 1 << 20
MAX_WORLD = 64
MAX_CHANNELS = 16

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class PeerGone(Exception):
    """A rank has ended or cannot be reached; the message says which and how."""


# --- bytes ---------------------------------------------------------------------------------------------------------


class Tape:
    """A long string of random bytes, the same in every rank. A message is a piece of it, at a place of its own."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(random.Random(9).randbytes(TAPE_BYTES), TAPE_BYTES)
        self._at = ctypes.addressof(self._bytes)

    def place(self, stream: int, message: int) -> int:
        """The address of a message's bytes; sent from there, for nobody writes to the tape."""
        return self._at + (stream * 40_961 + message * 4_093) % (TAPE_BYTES - max(SIZES))  # primes

    def wrong(self, address: int, stream: int, message: int, size: int) -> int:
        """How many bytes at `address` are not the message's."""
        right = self.place(stream, message)
        if _libc.memcmp(address, right, size) == 0:
            return 0
        return sum(a != b for a, b in zip(ctypes.string_at(address, size), ctypes.string_at(right, size), strict=True))


def size_of(stream: int, message: int) -> int:
    return SIZES[(message * 7 + stream) % len(SIZES)]


@dataclass
class Counts:
    """What a rank did. `longest_ms`: the longest time from posting a message until its receiver had all of it."""

    rounds: int = 0
    messages_sent: int = 0
    bytes_sent: int = 0
    messages_checked: int = 0
    bytes_checked: int = 0
    bytes_wrong: int = 0
    longest_ms: float = 0.0
    first_wrong: str = ""


class Outgoing:
    """One connection's sends: `owed` messages are still to be posted."""

    def __init__(self, plugin: Plugin, comm: int, stream: int, tape: Tape, counts: Counts) -> None:
        self.plugin, self.comm, self.stream, self.tape, self.counts = plugin, comm, stream, tape, counts
        self.owed = self.posted = 0
        self.flying: deque[tuple[int, int, float]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.owed or self.flying)

    def pump(self, now: float) -> bool:
        moved = False
        while self.owed and len(self.flying) < WINDOW:
            size = size_of(self.stream, self.posted)
            request = self.plugin.isend(self.comm, self.tape.place(self.stream, self.posted), size)
            if not request:
                break
            self.flying.append((request, size, now))
            self.owed -= 1
            self.posted += 1
            moved = True
        while self.flying and self.plugin.test(self.flying[0][0]) is not None:
            _, size, since = self.flying.popleft()
            self.counts.messages_sent += 1
            self.counts.bytes_sent += size
            self.counts.longest_ms = max(self.counts.longest_ms, 1000 * (time.monotonic() - since))
            moved = True
        return moved


class Incoming:
    """One connection's receives, always WINDOW of them posted."""

    def __init__(self, plugin: Plugin, comm: int, stream: int, tape: Tape, counts: Counts) -> None:
        self.plugin, self.comm, self.stream, self.tape, self.counts = plugin, comm, stream, tape, counts
        self.room = max(SIZES) + GUARD
        self.memory = ctypes.create_string_buffer(bytes([CANARY]) * (self.room * WINDOW), self.room * WINDOW)
        self.clean = bytes([CANARY]) * GUARD
        self.posted = self.done = 0
        self.flying: deque[int] = deque()

    def _buffer(self, message: int) -> int:
        return ctypes.addressof(self.memory) + message % WINDOW * self.room

    def pump(self) -> bool:
        moved = False
        while len(self.flying) < WINDOW:
            buffer = self._buffer(self.posted)
            if self.posted >= WINDOW:  # it was cleared when its last message was checked: a late byte would show
                used = size_of(self.stream, self.posted - WINDOW)
                self._look_clean(buffer, min(used + GUARD, self.room), self.posted - WINDOW, "after")
            request = self.plugin.irecv(self.comm, buffer, max(SIZES))
            if not request:
                break
            self.flying.append(request)
            self.posted += 1
        while self.flying and (size := self.plugin.test(self.flying[0])) is not None:
            self.flying.popleft()
            self._check(self.done, size)
            self.done += 1
            moved = True
        return moved

    def _check(self, message: int, size: int) -> None:
        buffer, wanted = self._buffer(message), size_of(self.stream, message)
        wrong = abs(size - wanted) + self.tape.wrong(buffer, self.stream, message, min(size, wanted))
        if wrong:
            self._complain(wrong, f"message {message} of stream {self.stream} ({size} bytes of {wanted})")
        self._look_clean(buffer + size, GUARD, message, "behind")
        ctypes.memset(buffer, CANARY, size)
        self.counts.messages_checked += 1
        self.counts.bytes_checked += size

    def _look_clean(self, address: int, size: int, message: int, where: str) -> None:
        found = ctypes.string_at(address, size)
        if found.count(CANARY) != size:
            self._complain(size - found.count(CANARY), f"{where} message {message} of stream {self.stream}")

    def _complain(self, wrong: int, where: str) -> None:
        self.counts.bytes_wrong += wrong
        self.counts.first_wrong = self.counts.first_wrong or where


# --- meeting -------------------------------------------------------------------------------------------------------

Handles = dict[str, str]  # "FROM>TO/CHANNEL" -> the receiver's handle in hex


@dataclass
class Wire:
    """Lines of JSON over one TCP connection."""

    sock: socket.socket
    rest: bytearray = field(default_factory=bytearray)

    def send(self, message: Mapping[str, Any]) -> None:
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Raises ValueError for anything but a JSON object a line; OSError."""
        while b"\n" not in self.rest:
            chunk = self.sock.recv(65536)
            if not chunk:
                raise ConnectionResetError("the connection was closed")
            self.rest += chunk
            if len(self.rest) > MAX_LINE:
                raise ValueError("a line without an end")
        line, _, self.rest = self.rest.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not an object")
        return message


@dataclass(frozen=True)
class Place:
    """Who this rank is, and where rank 0 listens."""

    rank: int
    world: int
    address: str
    port: int


def meet(place: Place, mine: Handles, ended: Callable[[], bool]) -> tuple[Handles, list[Wire]]:
    """Everybody's handles, and the connections that close when somebody ends. Raises PeerGone."""
    return _host(place, mine, ended) if place.rank == 0 else _join(place, mine, ended)


def _host(place: Place, mine: Handles, ended: Callable[[], bool]) -> tuple[Handles, list[Wire]]:
    deadline = time.monotonic() + MEET_S
    present: dict[int, Wire] = {}
    handles = dict(mine)
    with socket.create_server((place.address, place.port), backlog=MAX_WORLD) as listener:
        listener.settimeout(0.2)
        while len(present) < place.world - 1:
            if ended():
                raise PeerGone("ended while waiting for the others")
            if time.monotonic() > deadline:
                missing = sorted(set(range(1, place.world)) - set(present))
                raise PeerGone(f"ranks {missing} did not come within {MEET_S:.0f} s")
            with suppress(TimeoutError):
                sock, _ = listener.accept()
                sock.settimeout(HELLO_S)
                wire = Wire(sock)
                rank, theirs = _hello(wire, place)
                if rank is None:
                    sock.close()  # a stranger, or a rank of another job
                    continue
                if rank in present:
                    present[rank].sock.close()  # it was started again meanwhile
                present[rank] = wire
                handles.update(theirs)
    for rank, wire in present.items():
        try:
            wire.send({"handles": handles})
        except OSError as error:
            raise PeerGone(f"rank {rank} left while all met: {error.strerror}") from None
    return handles, list(present.values())


def _hello(wire: Wire, place: Place) -> tuple[int | None, Handles]:
    try:
        said = wire.receive()
        rank, world, handles = said["rank"], said["world"], said["handles"]
        usable = isinstance(rank, int) and 0 < rank < place.world and world == place.world
        if usable and all(isinstance(k, str) and isinstance(v, str) for k, v in handles.items()):
            return rank, handles
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        pass
    return None, {}


def _join(place: Place, mine: Handles, ended: Callable[[], bool]) -> tuple[Handles, list[Wire]]:
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            sock = socket.create_connection((place.address, place.port), timeout=HELLO_S)
            break
        except OSError as error:
            if ended() or time.monotonic() > deadline:
                where = f"{place.address}:{place.port}"
                raise PeerGone(f"rank 0 cannot be reached at {where}: {error.strerror or error}") from None
            time.sleep(0.1)
    wire = Wire(sock)
    try:
        wire.send({"rank": place.rank, "world": place.world, "handles": mine})
        sock.settimeout(max(1.0, deadline - time.monotonic()))
        handles = wire.receive()["handles"]
        sock.settimeout(HELLO_S)
        return {str(name): str(handle) for name, handle in handles.items()}, [wire]
    except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
        sock.close()
        raise PeerGone(f"rank 0 did not answer: {error}") from None


# --- the job -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """`rounds` 0: until SIGTERM. `round_s`: from the start of one round to the next. `report`: a JSON file, or None."""

    channels: int
    round_s: float
    rounds: int
    report: Path | None


class Job:
    def __init__(self, place: Place, options: Options) -> None:
        self.place, self.options = place, options
        self.counts = Counts()
        self.tape = Tape()
        self.ended = False
        self.outgoing: list[Outgoing] = []
        self.incoming: list[Incoming] = []
        self._reported_s = 0.0
        self._started_s = time.time()

    def run(self) -> None:
        """Raises PeerGone, PluginError."""
        plugin = Plugin(plugin_path(), 12)
        lines: list[Wire] = []
        try:
            lines = self._connect(plugin)
            say(f"rank {self.place.rank} of {self.place.world}: {len(self.outgoing)} connections each way")
            self._rounds(lines)
        except PluginError as error:
            said = "".join(f"\n  {line}" for line in plugin.lines[-8:])
            raise (PeerGone(f"a connection is over: {error}{said}") if error.code == REMOTE else error) from None
        finally:
            self._report("ended")
            for line in lines:
                line.sock.close()
            for sender in self.outgoing:
                plugin.close_send(sender.comm)
            for receiver in self.incoming:
                plugin.close_receive(receiver.comm)
            plugin.close()

    def _connect(self, plugin: Plugin) -> list[Wire]:
        me, devices = self.place.rank, plugin.devices()
        others = [rank for rank in range(self.place.world) if rank != me]
        channels = range(self.options.channels)
        listeners: dict[tuple[int, int], int] = {}
        mine: Handles = {}
        for other in others:
            for channel in channels:
                comm, handle = plugin.listen(channel % devices)
                listeners[other, channel] = comm
                mine[_key(other, me, channel)] = handle.hex()
        handles, lines = meet(self.place, mine, lambda: self.ended)
        try:
            sends = {
                (other, channel): plugin.connect(channel % devices, bytes.fromhex(handles[_key(me, other, channel)]))
                for other in others
                for channel in channels
            }
            for (other, channel), listener in listeners.items():
                comm = plugin.accept(listener, timeout_s=30.0)
                plugin.close_listen(listener)
                stream = self._stream(other, me, channel)
                self.incoming.append(Incoming(plugin, comm, stream, self.tape, self.counts))
            for (other, channel), comm in sends.items():
                stream = self._stream(me, other, channel)
                self.outgoing.append(Outgoing(plugin, comm, stream, self.tape, self.counts))
        except (KeyError, ValueError):
            raise PeerGone("the handles of some rank are missing: has every rank the same --channels?") from None
        except TimeoutError as error:
            raise PeerGone(str(error)) from None
        return lines

    def _stream(self, sender: int, receiver: int, channel: int) -> int:
        return (sender * self.place.world + receiver) * self.options.channels + channel

    def _rounds(self, lines: Sequence[Wire]) -> None:
        next_round = looked = time.monotonic()
        while not self.ended:
            now = time.monotonic()
            busy = any(sender.busy for sender in self.outgoing)
            if self.options.rounds and self.counts.rounds >= self.options.rounds and not busy and self._all_came():
                self._part(lines)
                return
            wanted = not self.options.rounds or self.counts.rounds < self.options.rounds
            if wanted and not busy and now >= next_round:
                self.counts.rounds += 1
                next_round = max(next_round + self.options.round_s, now)
                for sender in self.outgoing:
                    sender.owed += len(SIZES)
            moved = [sender.pump(now) for sender in self.outgoing] + [receiver.pump() for receiver in self.incoming]
            if now - looked >= 0.1:
                looked = now
                self._look_for_ends(lines)
                if now - self._reported_s >= REPORT_S:
                    self._reported_s = now
                    self._report("running")
            if not any(moved):
                time.sleep(BUSY_S if busy else IDLE_S)

    def _all_came(self) -> bool:
        return all(receiver.done >= self.options.rounds * len(SIZES) for receiver in self.incoming)

    def _part(self, lines: Sequence[Wire]) -> None:
        """Nobody closes a connection before everybody has everything: rank 0 hears it from all, then says so."""
        try:
            if self.place.rank != 0:
                lines[0].send({"done": True})
            for line in lines:
                line.sock.settimeout(MEET_S)
                line.receive()
            if self.place.rank == 0:
                for line in lines:
                    line.send({"done": True})
        except (OSError, ValueError) as error:
            raise PeerGone(f"a rank left before all were done: {error}") from None

    def _look_for_ends(self, lines: Sequence[Wire]) -> None:
        readable, _, _ = select.select([line.sock for line in lines], [], [], 0)
        for sock in readable:
            # A rank that has finished already says so; the end of the stream is the end of the rank.
            if not sock.recv(1, socket.MSG_PEEK):
                raise PeerGone("rank 0 has ended" if self.place.rank else "a rank has ended")

    def _report(self, state: str) -> None:
        """Best effort: a full disk must not end the job."""
        path = self.options.report
        if path is None:
            return
        counts = self.counts
        document = {
            "schema": 1,
            "rank": self.place.rank,
            "world": self.place.world,
            "pid": os.getpid(),
            "state": state,
            "started": self._started_s,
            "time": time.time(),
            "rounds": counts.rounds,
            "messages_sent": counts.messages_sent,
            "bytes_sent": counts.bytes_sent,
            "messages_checked": counts.messages_checked,
            "bytes_checked": counts.bytes_checked,
            "bytes_wrong": counts.bytes_wrong,
            "first_wrong": counts.first_wrong,
            "longest_ms": round(counts.longest_ms, 3),
        }
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with suppress(OSError):
            temporary.write_text(json.dumps(document) + "\n")
            os.replace(temporary, path)


def _key(sender: int, receiver: int, channel: int) -> str:
    return f"{sender}>{receiver}/{channel}"


def say(text: str) -> None:
    with suppress(OSError):
        print(f"ncclrun: {text}", file=sys.stderr, flush=True)


def read_place(environ: Mapping[str, str]) -> Place:
    """Raises SettingsError."""
    numbers = {}
    for name, low, high in (("RANK", 0, MAX_WORLD - 1), ("WORLD_SIZE", 2, MAX_WORLD), ("MASTER_PORT", 1, 65535)):
        text = environ.get(name, "")
        if not (text.isdecimal() and low <= int(text) <= high):
            raise SettingsError(f"{name}={text}: not a number of {low} to {high}", hint="set it as torchrun does")
        numbers[name] = int(text)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise SettingsError(f"RANK={numbers['RANK']}: not below WORLD_SIZE={numbers['WORLD_SIZE']}")
    address = environ.get("MASTER_ADDR", "")
    if not address:
        raise SettingsError("MASTER_ADDR is not set", hint="the address at which rank 0 listens")
    return Place(numbers["RANK"], numbers["WORLD_SIZE"], address, numbers["MASTER_PORT"])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ftar_core.ncclrun", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rails", default=None, help="FTAR_NET_RAILS; default: all NICs but the management NIC")
    parser.add_argument("--token-file", default=None, help="FTAR_TOKEN_FILE")
    parser.add_argument(
        "--timeout-s", type=float, default=None, help="all rails dead for so long: an error; default 30"
    )
    parser.add_argument("--channels", type=int, default=2, help="connections from each rank to each other; default 2")
    parser.add_argument("--round-ms", type=int, default=200, help="from round to round; 0: without a pause")
    parser.add_argument("--rounds", type=int, default=0, help="end after so many; 0: go on until SIGTERM")
    parser.add_argument("--report", type=Path, default=None, help="write counts to this file, twice a second")
    parser.add_argument("--allow-sockets", action="store_true", help="also where an RDMA port is active")
    chosen = parser.parse_args(argv)
    if not 1 <= chosen.channels <= MAX_CHANNELS:
        parser.error(f"--channels {chosen.channels}: not in 1 to {MAX_CHANNELS}")
    if chosen.rounds < 0 or not 0 <= chosen.round_ms <= 60_000:
        parser.error("--rounds and --round-ms: not below 0, and at most a minute a round")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    chosen = _arguments(argv)
    try:
        place = read_place(os.environ)
        nccl.enable(
            rails=chosen.rails,
            token_file=chosen.token_file,
            timeout_s=chosen.timeout_s,
            allow_sockets=chosen.allow_sockets,
        )
    except FtarError as error:
        say(f"{error}" + (f" ({error.hint})" if error.hint else ""))
        return RankExit.USAGE
    job = Job(place, Options(chosen.channels, chosen.round_ms / 1000, chosen.rounds, chosen.report))

    def end(_number: int, _frame: object) -> None:
        job.ended = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        job.run()
    except PeerGone as error:
        if not job.ended:
            say(str(error))
            return RankExit.RESTART
    except PluginError as error:
        say(f"{error}; what the plugin said is above, or in NCCL's words: FTAR_NET_RAILS and FTAR_NET_OPTIONS")
        return RankExit.USAGE
    except OSError as error:
        say(f"{place.address}:{place.port}: {error.strerror or error}")
        return RankExit.RESTART
    counts = job.counts
    say(
        f"rank {place.rank}: {counts.messages_checked} messages, {counts.bytes_checked} bytes checked,"
        f" {counts.bytes_wrong} wrong{' (' + counts.first_wrong + ')' if counts.first_wrong else ''},"
        f" longest {counts.longest_ms:.1f} ms"
    )
    return WRONG if counts.bytes_wrong else RankExit.FINISHED


if __name__ == "__main__":
    sys.exit(main())
