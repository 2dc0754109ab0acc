"""The heartbeat datagram that a rank's native thread sends to the coordinator (UDP, the coordinator's port number).

Little endian, 48 bytes: magic "FTHB", u8 version, u8 phase, u16 rank, 16 bytes cookie (from Welcome), u64 seq,
u64 step, u32 buckets produced, u32 buckets reduced. Written by native/csrc/heartbeat.cpp, read here.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import msgspec

from ftar_core.errors import WireError

FORMAT = struct.Struct("<4sBBH16sQQII")
MAGIC = b"FTHB"
VERSION = 1


class Phase(IntEnum):
    """What a rank is doing. Phases other than forward, reduce and update have budgets of their own (not "hung")."""

    STARTUP = 0
    FORWARD = 1  # forward and backward
    REDUCE = 2  # all gradients produced, waiting for the ring
    COMMIT = 3  # reduced, waiting for the commit
    UPDATE = 4
    CATCHUP = 5
    CHECKPOINT = 6
    EVALUATION = 7


class Beat(msgspec.Struct, frozen=True):
    phase: Phase
    rank: int
    cookie: bytes
    seq: int
    step: int
    produced: int
    reduced: int


def parse(datagram: bytes) -> Beat:
    if len(datagram) != FORMAT.size:
        raise WireError(f"heartbeat of {len(datagram)} bytes, {FORMAT.size} expected")
    magic, version, phase, rank, cookie, seq, step, produced, reduced = FORMAT.unpack(datagram)
    if magic != MAGIC or version != VERSION:
        raise WireError("not a heartbeat of this version")
    try:
        return Beat(Phase(phase), rank, cookie, seq, step, produced, reduced)
    except ValueError as error:
        raise WireError(str(error)) from None
