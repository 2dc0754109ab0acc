"""What a replica trains, parameter by parameter, in few bytes: sent only when two replicas do not fit together, so that
the difference can be named.

A list of `Parameter`, in the order of the bucket plan, as compressed MessagePack of at most MAX_BYTES. A model whose
list is longer is cut short: the first difference is nearly always among the first thousands."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from ftar_core.errors import WireError

MAX_BYTES = 256 * 1024
MAX_UNPACKED = 16 * 1024 * 1024


class Parameter(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`shape` is the whole parameter's; `part` that of the first rank's, where it is sharded as `placement` says."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: tuple[int, ...]
    placement: str
    bucket: int


_decoder: msgspec.msgpack.Decoder[tuple[Parameter, ...]] = msgspec.msgpack.Decoder(tuple[Parameter, ...])


def pack(parameters: Sequence[Parameter]) -> bytes:
    """As many of them as fit."""
    count = len(parameters)
    while True:
        packed = zlib.compress(msgspec.msgpack.encode(tuple(parameters[:count])))
        if len(packed) <= MAX_BYTES:
            return packed
        count //= 2


def unpack(packed: bytes) -> tuple[Parameter, ...]:
    """Raises WireError for anything else than what `pack` makes, before it takes much memory."""
    if len(packed) > MAX_BYTES:
        raise WireError(f"an outline of {len(packed)} bytes (at most {MAX_BYTES})")
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(packed, MAX_UNPACKED)
        if inflate.unconsumed_tail or not inflate.eof:
            raise WireError("an outline that is cut off, or too long")
        return _decoder.decode(text)
    except (zlib.error, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not an outline: {error}") from None


def difference(mine: Sequence[Parameter], theirs: Sequence[Parameter], whose: str) -> str:
    """What is different first, as said of `mine`; empty if these agree. `whose`: the replica of `theirs`."""
    names, others = {p.name for p in mine}, {p.name for p in theirs}
    for one, other in zip(mine, theirs, strict=False):
        if one == other:
            continue
        if one.name == other.name:
            return f"parameter {one.name} {_changed(one, other, whose)}"
        if one.name not in others:
            return f"parameter {_shown(one)} is not on {whose}"
        if other.name not in names:
            return f"parameter {_shown(other)} of {whose} is missing"
        return f"parameter {one.name} comes where {whose} has {other.name}: the order is different"
    if len(mine) > len(theirs):
        return f"parameter {_shown(mine[len(theirs)])} is not on {whose}"
    if len(theirs) > len(mine):
        return f"parameter {_shown(theirs[len(mine)])} of {whose} is missing"
    return ""


def _shown(parameter: Parameter) -> str:
    return f"{parameter.name} {parameter.shape}"


def _changed(one: Parameter, other: Parameter, whose: str) -> str:
    if one.shape != other.shape:
        return f"has shape {one.shape}, on {whose} {other.shape}"
    if one.dtype != other.dtype:
        return f"is {one.dtype}, on {whose} {other.dtype}"
    if (one.placement, one.part) != (other.placement, other.part):
        here, there = (f"{p.placement or 'not sharded'}, {p.part} on rank 0" for p in (one, other))
        return f"is sharded otherwise ({here}; on {whose} {there})"
    return f"lies in bucket {one.bucket}, on {whose} in bucket {other.bucket}: bucket_bytes is different"
