"""The only door to libnccl: the few of its functions that the data plane between replicas calls, through ctypes.

Declarations are our own, from the public header (NCCL 2.17 and later). Torch is not imported.

* Every communicator is non-blocking: a call returns at once, what it began is done when `state` says so. That is what
  makes a communicator abortable at any moment, in the middle of its making too.
* `ncclConfig_t` grows with every few versions. The library reads as many bytes as `size` says and fills the rest with
  defaults by `version`, so the layout of 2.17, which has all that is set here, is right for every later one.
* A communicator ends by `abort`, also one that is at rest: `ncclCommFinalize` waits for the other members, who may be
  gone, and frees nothing that abort does not.

A library is named by FTAR_NCCL_LIBRARY, or found where torch's is (ncclenv.find_nccl), so that a process has one.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from enum import IntEnum
from pathlib import Path

from ftar_core.errors import FtarError, SettingsError
from ftar_core.ncclenv import find_nccl

OLDEST = (2, 17, 0)
ID_BYTES = 128
_UNSET = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21700
_SUM = 0
_SUCCESS, _IN_PROGRESS = 0, 7
VARIABLE = "FTAR_NCCL_LIBRARY"


class NcclType(IntEnum):
    INT32 = 2
    INT64 = 4
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9


class NcclError(FtarError):
    """NCCL refused a call, or a communicator has failed."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class Config(ctypes.Structure):
    """ncclConfig_t as of 2.17: 48 bytes."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
    )

    @classmethod
    def non_blocking(cls) -> Config:
        unset = dict.fromkeys(("cga_cluster_size", "min_ctas", "max_ctas", "split_share"), _UNSET)
        return cls(size=ctypes.sizeof(cls), magic=_MAGIC, version=_CONFIG_VERSION, blocking=0, **unset)


_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ncclGetVersion": (c_int, (POINTER(c_int),)),
    "ncclGetUniqueId": (c_int, (POINTER(_UniqueId),)),
    "ncclCommInitRankConfig": (c_int, (POINTER(c_void_p), c_int, _UniqueId, c_int, POINTER(Config))),
    "ncclAllReduce": (c_int, (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)),
    "ncclCommGetAsyncError": (c_int, (c_void_p, POINTER(c_int))),
    "ncclCommAbort": (c_int, (c_void_p,)),
    "ncclGetErrorString": (c_char_p, (c_int,)),
    "ncclGetLastError": (c_char_p, (c_void_p,)),
}


class Library:
    """A loaded libnccl. Any thread. Raises SettingsError: not a libnccl of 2.17 or later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # RTLD_NOW: what the library lacks is found here, not in the first epoch.
            self._library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            raise SettingsError(
                f"{path} cannot be loaded: {error}", hint=f"set {VARIABLE} to a libnccl.so.2 of this machine"
            ) from None
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(self._library, name)
            except AttributeError:
                raise SettingsError(
                    f"{path} has no {name}, so it is no libnccl of 2.17 or later",
                    hint="run: pip install --upgrade nvidia-nccl-cu12 (or -cu13, for the CUDA of your torch)",
                ) from None
            function.restype, function.argtypes = result, arguments
        code = c_int()
        self.check(self._library.ncclGetVersion(byref(code)), "ncclGetVersion")
        self.version = code.value // 10000, code.value // 100 % 100, code.value % 100
        if self.version < OLDEST:
            raise SettingsError(
                f"{path} is NCCL {self.version_text}: communicators that can be aborted while they are made need 2.17",
                hint="run: pip install --upgrade nvidia-nccl-cu12 (or -cu13, for the CUDA of your torch)",
            )

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))

    def unique_id(self) -> bytes:
        """Names a communicator to be; for its members only. The process that asks must take part. Raises NcclError."""
        made = _UniqueId()
        self.check(self._library.ncclGetUniqueId(byref(made)), "ncclGetUniqueId")
        return bytes(made)

    def join(self, unique_id: bytes, members: int, me: int) -> Communicator:
        """Begin to make a communicator, on the calling thread's device: it is ready when its `state` is. The others
        must do the same. Raises NcclError, ValueError."""
        if len(unique_id) != ID_BYTES or not 0 <= me < members:
            raise ValueError(f"an id of {len(unique_id)} bytes, member {me} of {members}")
        handle = c_void_p()
        result = self._library.ncclCommInitRankConfig(
            byref(handle), members, _UniqueId.from_buffer_copy(unique_id), me, byref(Config.non_blocking())
        )
        if handle.value is None:
            self.check(result, "ncclCommInitRankConfig")
            raise NcclError("ncclCommInitRankConfig made no communicator")
        return Communicator(self, self._library, handle, result)

    def check(self, result: int, what: str, comm: c_void_p | None = None) -> None:
        if result in (_SUCCESS, _IN_PROGRESS):
            return
        text = (self._library.ncclGetErrorString(result) or b"").decode(errors="replace")
        more = (self._library.ncclGetLastError(comm) or b"").decode(errors="replace").strip()
        raise NcclError(
            f"{what}: {text} (ncclResult_t {result}){': ' + more if more else ''}",
            hint="set NCCL_DEBUG=WARN and look at what NCCL prints before this",
        )


class Communicator:
    """One process's part. All calls are those of one thread, but `abort`, which may be anybody's, once."""

    alive = 0  # of this process: made, and not aborted
    _count = threading.Lock()

    def __init__(self, owner: Library, library: ctypes.CDLL, handle: c_void_p, result: int) -> None:
        self._owner, self._library, self._handle = owner, library, handle
        self._refused = result  # the making failed at once, but there is something to abort
        with Communicator._count:
            Communicator.alive += 1

    def ready(self) -> bool:
        """What was begun last (the making, or putting an operation on its stream) is done. Raises NcclError if the
        communicator has failed; it is only good for `abort` then."""
        self._owner.check(self._refused, "ncclCommInitRankConfig", self._handle)
        state = c_int()
        self._owner.check(self._library.ncclCommGetAsyncError(self._handle, byref(state)), "ncclCommGetAsyncError")
        self._owner.check(state.value, "the communicator", self._handle)
        return state.value != _IN_PROGRESS

    def all_reduce(self, source: int, target: int, count: int, dtype: NcclType, stream: int) -> None:
        """Put the sum of `count` elements on a stream (a cudaStream_t): of `source` into `target`, device addresses.
        It is there when `ready` says so; the next call must wait for that. Raises NcclError."""
        result = self._library.ncclAllReduce(source, target, count, dtype, _SUM, self._handle, stream)
        self._owner.check(result, "ncclAllReduce", self._handle)

    def abort(self) -> None:
        """Ends kernels that wait for members, and frees the communicator. May take its time. Raises NcclError."""
        handle, self._handle = self._handle, c_void_p()
        if handle.value is None:
            return
        try:
            self._owner.check(self._library.ncclCommAbort(handle), "ncclCommAbort")
        finally:
            with Communicator._count:
                Communicator.alive -= 1


def load(named: str = "") -> Library:
    """The library at `named`, or the one that torch would load. Raises SettingsError."""
    if named:
        return Library(Path(named))
    found = find_nccl()
    if found is None:
        raise SettingsError(
            "data_plane='nccl': there is no libnccl.so.2 here",
            hint=f"install a torch with CUDA, or set {VARIABLE} to the library, or use data_plane='host'",
        )
    return Library(found.path)
