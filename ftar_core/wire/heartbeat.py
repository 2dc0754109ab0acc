"""The heartbeat datagram of a rank's native thread: a leader's goes to the coordinator, another rank's to its leader.

UDP, little endian, 48 bytes: magic "FTHB", u8 version, u8 phase, u16 rank, 16 bytes cookie (from Welcome or Welcomed),
u64 seq, u64 step, u32 buckets produced, u32 buckets reduced. The leader of several ranks adds 32 bytes about the others
(`TeamBeat`), so that the coordinator hears one datagram a replica however many ranks that has: u16 ranks heard, u16 the
quietest, u32 its silence in ms, u16 the rank that has produced least, u16 how many stand where it stands, u8 its phase,
3 zero bytes, u64 its step, u32 its buckets produced, u32 reduced. The highest bit of a phase's byte says that it has
lasted longer than its budget; it is set by the native thread, so that a rank that hangs in a checkpoint says so itself.
Written by native/csrc/heartbeat.cpp and gather.cpp, read here.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import msgspec

from ftar_core.errors import WireError

FORMAT = struct.Struct("<4sBBH16sQQII")
TEAM_FORMAT = struct.Struct("<HHIHHB3xQII")
BEAT_BYTES, LONGEST_BYTES = FORMAT.size, FORMAT.size + TEAM_FORMAT.size
MAGIC = b"FTHB"
VERSION = 2

# At most so many datagrams a second reach a leader while its ranks beat no slower than SLOWEST times the interval: with
# suspicion after ten intervals (the default) three of them have to be lost before anybody is suspected.
MOST_BEATS_S = 2000
SLOWEST = 3
OVERDUE = 0x80


class Phase(IntEnum):
    """What a rank is doing. In BUSY phases it must get on; the others have budgets of their own (not "hung")."""

    STARTUP = 0
    FORWARD = 1  # forward and backward
    REDUCE = 2  # all gradients produced, waiting for the ring
    COMMIT = 3  # reduced, waiting for the commit
    UPDATE = 4
    CATCHUP = 5
    CHECKPOINT = 6
    EVALUATION = 7
    COMPILE = 8  # also the first steps of a process, in which libraries compile and allocate


BUSY = frozenset({Phase.FORWARD, Phase.REDUCE, Phase.COMMIT, Phase.UPDATE})
# By the byte of the phase: (phase, overdue). A table, since ten thousand a second are looked up.
_PHASES = {phase | late: (phase, late > 0) for phase in Phase for late in (0, OVERDUE)}


class TeamBeat(msgspec.Struct, frozen=True):
    """What a leader knows of its ranks. `least` is the one that has produced least by (step, produced, reduced), the
    leader included; `sharing` ranks stand there (1: it stands out)."""

    heard: int  # ranks above 0 that have sent a heartbeat at all
    quietest: int  # of those, the one that was heard of longest ago
    silent_ms: int
    least: int
    sharing: int
    phase: Phase
    step: int
    produced: int
    reduced: int
    overdue: bool = False


class Beat(msgspec.Struct, frozen=True):
    phase: Phase
    rank: int
    cookie: bytes
    seq: int
    step: int
    produced: int
    reduced: int
    team: TeamBeat | None = None
    overdue: bool = False


def parse(datagram: bytes) -> Beat:
    size = len(datagram)
    if size not in (BEAT_BYTES, LONGEST_BYTES):
        raise WireError(f"heartbeat of {size} bytes, {BEAT_BYTES} or {LONGEST_BYTES} expected")
    magic, version, phase, rank, cookie, seq, step, produced, reduced = FORMAT.unpack_from(datagram)
    if magic != MAGIC or version != VERSION:
        raise WireError("not a heartbeat of this version")
    try:
        team = None
        if size > BEAT_BYTES:
            heard, quietest, silent_ms, least, sharing, its, at, made, summed = TEAM_FORMAT.unpack_from(
                datagram, BEAT_BYTES
            )
            its, late = _PHASES[its]
            team = TeamBeat(heard, quietest, silent_ms, least, sharing, its, at, made, summed, late)
        phase, late = _PHASES[phase]
        return Beat(phase, rank, cookie, seq, step, produced, reduced, team, late)
    except KeyError as error:
        raise WireError(f"a heartbeat of phase {error}, which there is not") from None


def rank_interval_ms(interval_ms: int, ranks: int) -> int:
    """How often each of `ranks` ranks beats to its leader, where the leader does every `interval_ms`."""
    return min(interval_ms * SLOWEST, max(interval_ms, ranks * 1000 // MOST_BEATS_S))
