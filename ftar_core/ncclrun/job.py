"""One rank of the job: connect to all others, send in rounds, check, report; part when everybody has everything."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ftar_core.ncclabi import REMOTE, Plugin, PluginError
from ftar_core.ncclenv import plugin_path
from ftar_core.ncclrun.meeting import MEET_S, Handles, PeerGone, Place, Wire, meet
from ftar_core.ncclrun.traffic import SIZES, Counts, Incoming, Outgoing, Tape

REPORT_S = 0.5
IDLE_S, BUSY_S = 0.002, 0.0002  # sleep when nothing moved: without, and with messages on their way


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
