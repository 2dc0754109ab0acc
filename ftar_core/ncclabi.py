"""NCCL's network plugin interface as NCCL itself uses it, in ctypes: for tests, and for jobs without GPUs (ncclrun).

The structures are written from the same facts as the plugin's, not from its code. One class speaks all versions.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_float, c_int, c_int16, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

SUCCESS, SYSTEM, INTERNAL, ARGUMENT, USAGE, REMOTE = 0, 2, 3, 4, 5, 6
HANDLE_BYTES = 128
VERSIONS = (8, 11, 12)

# (level, flags, file, line, format, first argument): the plugin's format is always "... %s".
LOG = CFUNCTYPE(None, c_int, ctypes.c_ulong, c_char_p, c_int, c_char_p, c_char_p)

HEAD: list[Any] = [
    ("name", c_char_p),
    ("pci_path", c_char_p),
    ("guid", c_uint64),
    ("ptr_support", c_int),
    ("reg_is_global", c_int),
]
MIDDLE: list[Any] = [
    ("speed", c_int),
    ("port", c_int),
    ("latency", c_float),
    ("max_comms", c_int),
    ("max_recvs", c_int),
    ("device_type", c_int),
    ("device_version", c_int),
]
TAIL: list[Any] = [("max_p2p_bytes", c_size_t), ("max_coll_bytes", c_size_t), ("max_multi_request", c_int)]


class VDevice4(Structure):
    _fields_ = [("ndevs", c_int), ("devs", c_int * 4)]


class VDevice8(Structure):
    _fields_ = [("ndevs", c_int), ("devs", c_int * 8)]


class Properties8(Structure):
    _fields_ = [*HEAD, *MIDDLE]


class Properties11(Structure):
    _fields_ = [*HEAD, ("force_flush", c_int), *MIDDLE, ("vprops", VDevice4), *TAIL]


class Properties12(Structure):
    _fields_ = [
        *HEAD,
        ("force_flush", c_int),
        *MIDDLE,
        ("vprops", VDevice8),
        *TAIL,
        ("rail_id", c_int16),
        ("plane_id", c_int16),
    ]


PROPERTIES: dict[int, type[Structure]] = {8: Properties8, 11: Properties11, 12: Properties12}
P = c_void_p
OLD = [
    "init",
    "devices",
    "getProperties",
    "listen",
    "connect",
    "accept",
    "regMr",
    "regMrDmaBuf",
    "deregMr",
    "isend",
    "irecv",
    "iflush",
    "test",
    "closeSend",
    "closeRecv",
    "closeListen",
    "getDeviceMr",
    "irecvConsumed",
]
NEW = [*OLD, "makeVDevice", "finalize", "setNetAttr"]


def _types(version: int) -> dict[str, list[Any]]:
    size = c_int if version == 8 else c_size_t
    context: list[Any] = [] if version == 8 else [P]
    extra: list[Any] = [] if version == 8 else [P]
    return {
        "init": [LOG] if version == 8 else [POINTER(P), c_uint64, POINTER(c_int), LOG, P],
        "devices": [POINTER(c_int)],
        "getProperties": [c_int, P],
        "listen": [*context, c_int, P, POINTER(P)],
        "connect": [*context, c_int, P, POINTER(P), POINTER(P)],
        "accept": [P, POINTER(P), POINTER(P)],
        "regMr": [P, P, c_size_t, c_int, POINTER(P)],
        "deregMr": [P, P],
        "isend": [P, P, size, c_int, P, *extra, POINTER(P)],
        "irecv": [
            P,
            c_int,
            POINTER(P),
            POINTER(size),
            POINTER(c_int),
            POINTER(P),
            *([POINTER(P)] if extra else []),
            POINTER(P),
        ],
        "iflush": [P, c_int, POINTER(P), POINTER(c_int), POINTER(P), POINTER(P)],
        "test": [P, POINTER(c_int), POINTER(c_int)],
        "closeSend": [P],
        "closeRecv": [P],
        "closeListen": [P],
        "finalize": [P],
    }


# The plugin logs for the whole process, with the function of the communicator that came last, and from a thread of its
# own, also when that communicator is gone: NCCL's logger is a function that stays, so ours stay, too.
_LOGGERS: list[Any] = []


class PluginError(Exception):
    """`said`: what the plugin logged before, each line with NCCL's level in front (2: a warning)."""

    def __init__(self, call: str, code: int, said: Sequence[str] = ()) -> None:
        super().__init__(f"{call}: result {code}")
        self.code = code
        self.said = tuple(said)


class Overrun(PluginError):
    """The plugin wrote behind the memory that it was given."""

    def __init__(self, call: str) -> None:
        super().__init__(f"{call} wrote too much", 0)


class Plugin:
    """One communicator's view of the plugin: `init` now, `finalize` in close().

    Every call raises PluginError with NCCL's result code; those with a time-out raise TimeoutError.
    """

    def __init__(self, path: Path, version: int, *, log: bool = True) -> None:
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        names = OLD if version == 8 else NEW
        table = (P * (1 + len(names))).in_dll(self.library, f"ncclNetPlugin_v{version}")
        self.version = version
        self.name = ctypes.string_at(table[0] or 0)
        types = _types(version)
        self.present = {name for name, address in zip(names, table[1:], strict=True) if address}
        self.calls = {
            name: CFUNCTYPE(c_int, *types[name])(address)
            for name, address in zip(names, table[1:], strict=True)
            if address and name in types
        }
        self.size = c_int if version == 8 else c_size_t
        self.lines: list[str] = []
        self._log = LOG(self._said) if log else LOG()
        _LOGGERS.append(self._log)
        self.context = P()
        if version == 8:
            self.call("init", self._log)
        else:
            config = c_int(-1)
            self.call("init", byref(self.context), 7, byref(config), self._log, None)

    def _said(self, level: int, _flags: int, _file: bytes, _line: int, form: bytes, text: bytes | None) -> None:
        self.lines.append(f"{level} " + form.decode().replace("%s", (text or b"").decode()))

    def call(self, name: str, *arguments: Any) -> None:
        if code := self.calls[name](*arguments):
            raise PluginError(name, code, self.lines[-8:])

    def _in_context(self) -> list[Any]:
        return [] if self.version == 8 else [self.context]

    def devices(self) -> int:
        count = c_int(-1)
        self.call("devices", byref(count))
        return count.value

    def properties(self, device: int) -> Any:
        # A guard behind the structure: the plugin must write no byte more than the version's size.
        kind = PROPERTIES[self.version]
        memory = ctypes.create_string_buffer(b"\xee" * (ctypes.sizeof(kind) + 64), ctypes.sizeof(kind) + 64)
        self.call("getProperties", device, ctypes.addressof(memory))
        if memory.raw[ctypes.sizeof(kind) :] != b"\xee" * 64:
            raise Overrun("getProperties")
        self._kept = memory
        return kind.from_buffer(memory)

    def listen(self, device: int) -> tuple[int, bytes]:
        handle = ctypes.create_string_buffer(b"\xee" * (HANDLE_BYTES + 64), HANDLE_BYTES + 64)
        comm = P()
        self.call("listen", *self._in_context(), device, ctypes.addressof(handle), byref(comm))
        if handle.raw[HANDLE_BYTES:] != b"\xee" * 64:
            raise Overrun("listen")
        return comm.value or 0, handle.raw[:HANDLE_BYTES]

    def try_connect(self, device: int, handle: bytes) -> int:
        memory, comm, dev = ctypes.create_string_buffer(handle, HANDLE_BYTES), P(), P()
        self.call("connect", *self._in_context(), device, ctypes.addressof(memory), byref(comm), byref(dev))
        return comm.value or 0

    def connect(self, device: int, handle: bytes, timeout_s: float = 20.0) -> int:
        return self._until(lambda: self.try_connect(device, handle), "connect", timeout_s)

    def try_accept(self, listener: int) -> int:
        comm, dev = P(), P()
        self.call("accept", listener, byref(comm), byref(dev))
        return comm.value or 0

    def accept(self, listener: int, timeout_s: float = 20.0) -> int:
        return self._until(lambda: self.try_accept(listener), "accept", timeout_s)

    def register(self, comm: int, address: int, size: int, kind: int = 1) -> int:
        memory = P()
        self.call("regMr", comm, address, size, kind, byref(memory))
        return memory.value or 0

    def deregister(self, comm: int, memory: int) -> None:
        self.call("deregMr", comm, memory)

    def isend(self, comm: int, address: int, size: int, memory: int = 0) -> int:
        request = P()
        extra = [] if self.version == 8 else [None]
        self.call("isend", comm, address, size, 0, memory, *extra, byref(request))
        return request.value or 0

    def irecv(self, comm: int, address: int, size: int, memory: int = 0, optional: bool = False) -> int:
        request = P(1 if optional else None)
        data, sizes, tags, memories = (P * 1)(address), (self.size * 1)(size), (c_int * 1)(0), (P * 1)(memory)
        extra = [] if self.version == 8 else [(P * 1)(None)]
        self.call("irecv", comm, 1, data, sizes, tags, memories, *extra, byref(request))
        return request.value or 0

    def test(self, request: int) -> int | None:
        """None: not done; else the size."""
        done, size = c_int(-1), c_int(-1)
        self.call("test", request, byref(done), byref(size))
        return size.value if done.value else None

    def wait(self, request: int, timeout_s: float = 20.0) -> int:
        deadline = time.monotonic() + timeout_s
        while (size := self.test(request)) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the request is not done after {timeout_s} s")
            time.sleep(0.0002)
        return size

    def close_send(self, comm: int) -> None:
        self.call("closeSend", comm)

    def close_receive(self, comm: int) -> None:
        self.call("closeRecv", comm)

    def close_listen(self, comm: int) -> None:
        self.call("closeListen", comm)

    def close(self) -> None:
        if self.version != 8:
            self.call("finalize", self.context)

    def _until(self, attempt: Any, what: str, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while not (comm := attempt()):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{what}: nothing after {timeout_s} s; {self.lines[-8:]}")
            time.sleep(0.001)
        return int(comm)


def pair(plugin: Plugin, here: int = 0, there: int = 0) -> tuple[int, int]:
    """(send comm, receive comm), both ends in this process."""
    listener, handle = plugin.listen(there)
    send = plugin.connect(here, handle)
    receive = plugin.accept(listener)
    plugin.close_listen(listener)
    return send, receive
