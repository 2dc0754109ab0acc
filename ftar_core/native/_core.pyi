"""The contract of the native core (csrc/module.cpp). All calls are thread-safe; the blocking ones release the GIL."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypedDict

ABI: int
Buffer: TypeAlias = bytes | bytearray | memoryview

class Options:
    """Settings of the link layer; times in milliseconds, sizes in bytes."""

    heartbeat_ms: int  # rail heartbeat interval, 50
    heartbeat_misses: int  # rail DOWN after this many silent intervals, 3
    carrier_poll_ms: int  # ETHTOOL_GLINK poll, 2
    hold_down_ms: int  # first hold-down after repair, 1000; doubles with each flap to hold_down_max_ms, 60000
    hold_down_max_ms: int
    probe_echoes: int  # good echoes before HOLD, 5
    probe_interval_ms: int  # between connection attempts and echoes while PROBING, 50
    unreachable_ms: int  # all rails to a peer dead for so long -> event "unreachable", 200
    handshake_ms: int  # strangers are dropped after, 3000
    chunk_bytes: int  # pipeline unit of the ring
    window_bytes: int  # most bytes in flight a link
    unposted_bytes: int  # most that a process holds of messages that came before their place, all links together
    congestion: str  # TCP congestion control of data sockets, "cubic"
    mode: str  # "backup": one rail carries the data, the others stand by; "stripe": every rail carries its share
    def __init__(self) -> None: ...

class Member(TypedDict):
    """One ring member as `Engine.prepare` takes it."""

    name: str
    incarnation: int
    rails: list[tuple[str, str, int]]  # (rail, addr, port)

class Event(TypedDict, total=False):
    """type: ready | reduced | failed | rail | unreachable | peer_gone | refused

    ready        {epoch}                                    all links of a prepared epoch are up
    reduced      {epoch, step, bucket}                      the all-reduce of a bucket is complete in dst
    failed       {epoch, step, bucket, reason}              it cannot complete in this epoch (a peer is gone)
    rail         {epoch, peer, rail, direction, state, reason, active, detect_ms}
    unreachable  {epoch, peer, reason}                      all rails to the peer dead for unreachable_ms
    peer_gone    {epoch, peer, reason}                      the peer closed its links (its process ended)
    refused      {peer, reason}                             a host speaks another version of the wire protocol
    """

    type: str
    epoch: bytes
    step: int
    bucket: int
    peer: str
    rail: str
    direction: str
    state: str
    active: bool
    reason: str
    detect_ms: float | None
    time: float  # CLOCK_MONOTONIC seconds

class LinkStat(TypedDict):
    peer: str
    rail: str
    direction: str  # out | in
    state: str  # UP | DOWN | PROBING | HOLD | CLOSED
    active: bool
    reason: str
    since_s: float
    flaps: int
    resumes: int
    bytes: int
    hold_left_ms: int

class Device:
    """Memory that is not the host's (csrc/device.h)."""

    @property
    def name(self) -> str: ...
    def failure(self) -> str:
        """Empty, or the call that failed and the driver's error. For good: nothing is done on this device any more."""

    def check(self, areas: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, bool]]:
        """(address there, count, dtype, seed) each: the same as `core.check` of a copy. Waits for the device, without
        the GIL. RuntimeError: the device's."""

def host_device() -> Device:
    """The CPU as a device, for tests of the control code: everything is done when it is asked for."""

def cuda_device(ordinal: int, library: str = "libcuda.so.1", timeout_ms: int = 60000) -> Device:
    """A GPU by the CUDA driver, in its primary context (torch's), by the driver's number. RuntimeError: no driver, a
    function that it lacks, no such device, no memory. A device that does not do within `timeout_ms` what it was asked
    ends the process with a line that says so, exit code 75 (wire/exits.py): threads that hang in a driver cannot be
    ended, and memory that a copy may still write to cannot be given back."""

class Engine:
    """One I/O thread, listening sockets on every rail, the rings of the current and of prepared epochs.

    rails: (rail name, network device, IPv4/IPv6 address). A device of "" means: do not bind to a device (loopback).
    Raises ValueError for a rail that does not exist or has no such address, OSError for the socket's own errors.
    """

    def __init__(
        self, job: str, token: bytes, name: str, incarnation: int, rails: list[tuple[str, str, str]], options: Options
    ) -> None: ...
    def endpoints(self) -> list[tuple[str, str, int]]:
        """(rail, addr, port) of the listening sockets; UDP heartbeats of a rail use the same port number."""

    def set_incarnation(self, incarnation: int) -> None: ...
    def event_fd(self) -> int:
        """Readable when events() has something."""

    def events(self) -> list[Event]: ...
    def prepare(self, epoch: bytes, members: list[Member], me: int) -> None:
        """Connect the links of an epoch (16-byte key) in the background; `members` by slot, `me` my index.

        Event `ready` when they are up; nothing happens if the epoch is prepared already. Rails of two members belong
        together by name, or by position if they share no name. ValueError: a member list that cannot be a ring, my own
        entry is not this engine (name, incarnation, rails), or 16 epochs are prepared already."""

    def activate(self, epoch: bytes) -> None:
        """Abort all operations and close all links of the active epoch; operations go to this one from now on.

        May be called before the links are up: operations wait for them. ValueError if it was never prepared or is over.
        """

    def discard(self, epoch: bytes) -> None: ...
    def use_device(self, device: Device, most_slots: int = 128) -> None:
        """The device on which memory of operations may lie; one for one engine, once (else ValueError). Takes pinned
        host memory: as many slots of a chunk as fit into 64 MiB, 4 to `most_slots`. RuntimeError: the device's."""

    def submit(
        self, epoch: bytes, step: int, bucket: int, src: int, dst: int, count: int, dtype: int, on_device: bool = False
    ) -> None:
        """Sum `count` elements of src over the members into dst (raw addresses, not overlapping).

        Both stay alive, and src unchanged, until `reduced`, `failed`, or abort/activate of another epoch has returned.
        dst is the working buffer too: it holds partial sums until `reduced`, and garbage after `failed` or abort.
        Members may submit buckets in different order, but nobody may wait for one bucket before it has submitted
        another that a peer puts first. dtype: see DTYPES. Ignored (no event) if epoch is not active. ValueError:
        overlapping buffers, an unknown dtype, or the same (step, bucket) twice at a time.

        on_device: both are addresses of the engine's device (ValueError: it has none). src is complete there. When
        `reduced` comes, so is dst; after `failed`, and when abort or activate have returned, the device does nothing to
        either any more. Members of a ring may differ in where their memory is: the bits are the same."""

    def reduce(
        self, epoch: bytes, step: int, bucket: int, src: int, dst: int, count: int, dtype: int, timeout_ms: int
    ) -> Event | None:
        """`submit`, then wait for its `reduced` or `failed`, which is returned here and not by `events`.

        The waiting thread carries the ring's bytes itself, which saves a wake-up of another thread: for callers that
        have nothing else to do meanwhile. Returns None if neither came within `timeout_ms` or a signal came: the
        operation goes on, and its event comes by `events`. An epoch that is not active: `failed` with the reason."""

    def abort(self) -> None:
        """No operation touches its buffers after this returns; the epoch's links are closed."""

    def break_at(self, step: int, bucket: int, signal: int) -> None:
        """The point `bucket` of wire/breakpoints.py: send `signal` to this process once, in the middle of `bucket` (-1:
        of any) of `step` or of the first step after it."""

    def links(self) -> list[LinkStat]: ...
    def close(self) -> None: ...

DTYPES: dict[str, int]  # "float32" 0, "float64" 1, "bfloat16" 2, "float16" 3, "int32" 4, "int64" 5

def digest(addr: int, nbytes: int, seed: int) -> int:
    """64-bit non-cryptographic hash of memory (releases the GIL); seed chains buffers."""

def digest_of(buffers: Sequence[Buffer]) -> int:
    """The same over several buffers, one chained to the next, from seed 0: where one ends and the next begins counts.
    Releases the GIL."""

def receive_into(fd: int, buffers: Sequence[Buffer]) -> int:
    """Fill writable buffers from a blocking socket; returns `digest_of(buffers)`. Releases the GIL. OSError: the
    socket's; TimeoutError when nothing comes within its SO_RCVTIMEO, ConnectionResetError at the end of the stream."""

def fan_out(fds: Sequence[int], data: bytes) -> list[tuple[int, int]]:
    """The same bytes into many sockets, without waiting for any. Returns those that did not take all: (place in `fds`,
    bytes taken, or -1: it takes nothing any more). Releases the GIL."""

def populate(addr: int, nbytes: int) -> bool:
    """Back this memory with pages now, contents unchanged. Releases the GIL. False where the kernel cannot."""

def quick_digest(addr: int, nbytes: int, seed: int) -> int:
    """Another one, faster, of memory as a whole. A change within one aligned 8-byte word, hence a single flipped bit,
    always changes it (csrc/digest.h). Releases the GIL."""

def check(addr: int, count: int, dtype: int, seed: int) -> tuple[int, bool]:
    """(`quick_digest` of the elements' bytes, `all_finite`), reading memory once. Releases the GIL."""

def squares(addr: int, count: int, dtype: int) -> float:
    """The sum of squares, of integers 0; how it is rounded depends on the CPU. Releases the GIL."""

def all_finite(addr: int, count: int, dtype: int) -> bool:
    """True if no element is infinite or NaN; integers always are finite. Releases the GIL."""

# --- the pure parts, for tests and diagrams ---

def sum_into(into: int, add: int, count: int, dtype: int) -> None:
    """into[i] += add[i] as the ring does it: 16-bit floats are added in fp32 and rounded to nearest even."""

def hmac_sha256(key: bytes, data: bytes) -> bytes: ...
def check_frame(header: bytes) -> str:
    """Empty if these 64 bytes are a valid frame header, else what is wrong with them."""

def rail_table() -> list[tuple[str, str, str]]:
    """(state, event, next state) of a rail's health: DOWN, PROBING, HOLD, UP."""

class SizeTest:
    """Do large packets pass where small ones do: pure, pings by their number (csrc/link_health.h)."""

    def __init__(self) -> None: ...
    def due(self, now_ms: float) -> bool: ...
    def large_sent(self, ping: int, now_ms: float) -> None: ...
    def large_back(self, ping: int) -> None: ...
    def small_back(self, ping: int) -> None: ...
    def passed(self) -> bool: ...
    def failed(self) -> bool: ...

class LinkHealth:
    """The health of all rails of a link: pure, `now_ms` is given (csrc/link_health.h)."""

    def __init__(self, rails: int, options: Options, now_ms: float) -> None: ...
    def connected(self, rail: int, now_ms: float) -> None: ...
    def connect_failed(self, rail: int, reason: str, now_ms: float) -> None: ...
    def closed(self, rail: int, reason: str, now_ms: float) -> None: ...
    def carrier(self, rail: int, up: bool, reason: str, now_ms: float) -> None: ...
    def heard(self, rail: int, now_ms: float) -> None: ...
    def echo(self, rail: int, now_ms: float) -> None: ...
    def notice(self, rail: int, reason: str, now_ms: float) -> None: ...
    def tick(self, now_ms: float) -> None: ...
    def take_changes(self) -> list[tuple[int, str, str, str, float]]:
        """(rail, event, new state, reason, ms from the last sign of life or -1) since the last call."""

    def state(self, rail: int) -> str: ...
    def reason(self, rail: int) -> str: ...
    def flaps(self, rail: int) -> int: ...
    def hold_until_ms(self, rail: int) -> float: ...
    def may_connect(self, rail: int, now_ms: float) -> bool: ...
    def connecting(self, rail: int, now_ms: float) -> None: ...
    def preferred(self) -> int: ...
    def unreachable(self, now_ms: float) -> str: ...
    def dead(self, now_ms: float) -> tuple[float, str]:
        """No rail works for so many ms, and why each does not; the text is empty if one does."""

    def silent_ms(self, rail: int, now_ms: float) -> float: ...

def stripe_share(loads: list[tuple[float, int]], rail: int, queued: int, piece: int) -> int:
    """How many bytes of the next `piece` this rail takes, of `queued` in all; 0: none (csrc/stripe.h).

    loads: (bytes a millisecond or 0 if not measured, bytes not acknowledged) of the rails that carry data."""

class RateMeter:
    """The rate of a rail from totals: bytes acknowledged, and milliseconds with something to send."""

    def __init__(self) -> None: ...
    def sample(self, acknowledged_bytes: int, busy_ms: float) -> None: ...
    def doubt(self) -> None: ...
    def rate(self) -> float:
        """Bytes a millisecond; 0: not measured."""

class BeatTurns:
    """When a path sends a heartbeat, and which ends it asks about: pure, `now_ms` is given (csrc/beat_turns.h)."""

    def __init__(self, options: Options, most_ends: int, now_ms: float) -> None: ...
    def join(self, end: int) -> None: ...
    def leave(self, end: int) -> None: ...
    def heard(self, now_ms: float) -> None: ...
    def round(self) -> None: ...
    def hurry(self, interval_ms: float) -> None: ...
    def next(self, now_ms: float) -> list[int]:
        """The ends that the ping which is due now asks about; empty: none is due."""

Frame = tuple[int, int, int, int, int, int]  # generation, seq, offset, length, total, address of the payload

class Outbox:
    """A sender's book: what to send, what is on which connection, what of it never arrived (csrc/outbox.h)."""

    def __init__(self, rails: int, window_bytes: int) -> None: ...
    def push(self, address: int, bytes: int) -> None: ...
    def opened(self, rail: int) -> int:
        """The generation of the new connection."""

    def closed(self, rail: int) -> int:
        """The generation to ask about, or 0."""

    def keep_from(self, rail: int) -> int: ...
    def next(self, rail: int, most: int) -> Frame | None: ...
    def questions(self) -> list[tuple[int, int]]:
        """(rail, generation), unanswered."""

    def acknowledged(self, seq: int) -> int:
        """How many messages that completes."""

    def answered(self, generation: int, frames: int, bytes: int) -> str:
        """Empty, or what is impossible about the answer."""

class Inbox:
    """A receiver's book (csrc/inbox.h); place(seq, total) gives an address, or None for "later"."""

    def __init__(self, rails: int, place: Callable[[int, int], int | None], unposted_bytes: int = 1 << 30) -> None: ...
    def opened(self, rail: int, generation: int, keep_from: int, window: int) -> str: ...
    def begins(self, rail: int, frame: Frame) -> tuple[int | None, str]:
        """(address or None for "not yet", why it is refused)"""

    def arrived(self, rail: int, bytes: int) -> None: ...
    def complete(self, rail: int) -> None: ...
    def closed(self, rail: int) -> None: ...
    def generation(self, rail: int) -> int: ...
    def lost(self, rail: int, generation: int, keep_from: int) -> tuple[int, int, int]:
        """(whole frames, bytes of the next, messages complete)"""

    def next(self) -> int | None:
        """The next message, if it is complete."""

    def find_places(self) -> None: ...
    def crowded(self) -> bool:
        """A fragment was put off because the process holds too much."""

    def room(self) -> bool:
        """One of those would not be now."""

    def stuck(self) -> bool:
        """Crowded, and what the user waits for may be behind."""

    def waits(self) -> bool: ...
    def next_seq(self) -> int: ...
    def fault(self) -> str: ...

class Heartbeat:
    """A native thread that sends ftar_core.wire.heartbeat datagrams, GIL or no GIL."""

    def __init__(self, host: str, port: int, cookie: bytes, rank: int, interval_ms: int) -> None: ...
    def progress(self, phase: int, step: int, produced: int, reduced: int) -> None: ...
    def budget(self, seconds: float) -> None:
        """The present phase may last so long; then its beats are marked as overdue. Below 0: no budget."""

    def retarget(self, host: str, port: int, cookie: bytes, interval_ms: int) -> None: ...
    def gather(self, host: str, cookie: bytes, ranks: int) -> int:
        """The leader of `ranks` ranks: receive the others' beats on a UDP port of `host`, which is returned, and sum
        them up in mine. OSError-like RuntimeError if there is no such address here."""

    def stop(self) -> None: ...
