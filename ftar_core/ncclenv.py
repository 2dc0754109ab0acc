"""The environment that makes NCCL use libnccl-net-ftar.so, and the reasons why it would not.

NCCL falls back in silence: a plugin that cannot be loaded, or that another setting outranks, leaves the job on the
built-in transport, which looks the same until the first link dies. So both NCCL_NET_PLUGIN (the file) and NCCL_NET (the
name inside it) are set: NCCL then ends with an error instead. What would still lead around the plugin is refused here.

Where an RDMA port is active, NCCL's own InfiniBand transport moves data without the CPU; this plugin carries sockets.
That is a choice for the user to make, not a side effect: `allow_sockets`.

No native code is loaded here: operators' tools ask these questions too.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftar_core.errors import NativeMissing, SettingsError

LIBRARY = "libnccl-net-ftar.so"
NET_NAME = "FTAR"  # NCCL compares it without case
INFINIBAND = Path("/sys/class/infiniband")
BOOTSTRAP_NOTE = (
    "NCCL's bootstrap sockets are outside any plugin: they use the interface in NCCL_SOCKET_IFNAME, and the handles"
    " with the secrets of connections travel over them; on a network that strangers can read set FTAR_TOKEN_FILE"
)
# Predicted from one TCP stream between two processes on a 2-core machine: 1.6 to 1.8 GB/s.
SOCKETS_COST = (
    "this plugin carries sockets, so the CPU would copy every byte at both ends, GPU memory would pass through"
    " the host and a connection would reach what a core copies (1.6 to 1.8 GB/s measured on a small machine),"
    " not the port's rate"
)
OFF = {"", "0"}
_TRIAL_S = 20.0
MODES = ("backup", "stripe")
# NCCL (from, before) version -> the newest interface of ours that it looks for. NVIDIA's sources of 2.20 to 2.32.
ABI_BY_VERSION: tuple[tuple[tuple[int, int], int], ...] = (((2, 30), 12), ((2, 28), 11), ((2, 20), 8))
_NEWEST_READ = (2, 32)


def plugin_path() -> Path:
    """The plugin's file in this installation. Raises NativeMissing."""
    spec = importlib.util.find_spec("ftar_core.native")
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / LIBRARY
        if path.is_file():
            return path
    raise NativeMissing(
        f"{LIBRARY} is not in this installation", hint="install ftctl on Linux with a C++20 compiler: pip install ftctl"
    )


@dataclass(frozen=True)
class RdmaPort:
    """An RDMA port in state ACTIVE. `rate` as the kernel says it, for example `100 Gb/sec (4X EDR)`."""

    device: str
    port: int
    rate: str


def active_rdma_ports(root: Path = INFINIBAND) -> list[RdmaPort]:
    """The ports under `root` (a sysfs tree, settable for tests) whose state is ACTIVE."""
    found = []
    for state in sorted(root.glob("*/ports/*/state")):
        if state.parent.name.isdigit() and _text(state).partition(":")[2].split() == ["ACTIVE"]:
            rate = _text(state.parent / "rate").strip() or "unknown rate"
            found.append(RdmaPort(state.parent.parent.parent.name, int(state.parent.name), rate))
    return found


def _text(path: Path) -> str:
    """Its content, or nothing: a device may go away between two looks."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def conflicts(current: Mapping[str, str]) -> Iterator[SettingsError]:
    """The settings in `current` with which NCCL would not use the plugin, or not for everything."""
    net = current.get("NCCL_NET", "").strip()
    if net and net.upper() != NET_NAME:
        yield SettingsError(
            f"NCCL_NET={net}: NCCL would use that network, not the plugin's ({NET_NAME})", hint="run: unset NCCL_NET"
        )
    plugin = current.get("NCCL_NET_PLUGIN", "").strip()
    if plugin and plugin != "ftar" and Path(plugin).name != LIBRARY:
        yield SettingsError(
            f"NCCL_NET_PLUGIN={plugin}: NCCL would load that, not {LIBRARY}", hint="run: unset NCCL_NET_PLUGIN"
        )
    if current.get("NCCL_NET_DISABLE_INTRA", "").strip() not in OFF:
        yield SettingsError(
            f"NCCL_NET_DISABLE_INTRA={current['NCCL_NET_DISABLE_INTRA']}: ranks of one node would not use the plugin",
            hint="run: unset NCCL_NET_DISABLE_INTRA",
        )
    if current.get("NCCL_COLLNET_ENABLE", "").strip() not in OFF:
        yield SettingsError(
            f"NCCL_COLLNET_ENABLE={current['NCCL_COLLNET_ENABLE']}: collectives in the network go around the plugin",
            hint="run: unset NCCL_COLLNET_ENABLE",
        )


def environment(
    *,
    plugin: Path,
    current: Mapping[str, str],
    rails: str | Sequence[str] | None = None,
    backup: str | Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    token_file: str | os.PathLike[str] | None = None,
    mode: str | None = None,
    allow_sockets: bool = False,
    infiniband: Path = INFINIBAND,
) -> dict[str, str]:
    """The variables to set, beside `current`, before NCCL starts. Raises SettingsError with the reason and the fix.

    rails: FTAR_NET_RAILS, device names or NAME=ADDRESS[@DEVICE]; None: every NIC but loopback and the management NIC.
    backup: FTAR_NET_BACKUP, {rail: its backup} or "none"; None: the nearest NIC.
    timeout_s: how long all rails or the peer may be dead before NCCL gets an error; None: 30.
    token_file: FTAR_TOKEN_FILE; None: a secret in each connection's handle.
    mode: "backup", one rail carries a connection's data and the others stand by, or "stripe", all carry it; it goes
        into FTAR_NET_OPTIONS beside what `current` has there. None: as it is there, else backup.
    """
    for conflict in conflicts(current):
        raise conflict
    ports = active_rdma_ports(infiniband)
    if ports and not allow_sockets:
        raise SettingsError(
            f"{ports_in_words(ports)}: {SOCKETS_COST}",
            hint="to use sockets all the same: allow_sockets=True, or ftctl env nccl --allow-sockets",
        )
    path = str(plugin)
    if "," in path:
        raise SettingsError(
            f"{path}: NCCL_NET_PLUGIN is a comma list, so the path cannot have a comma", hint="install ftctl elsewhere"
        )
    wanted = {"NCCL_NET_PLUGIN": path, "NCCL_NET": NET_NAME}
    if rails is not None:
        wanted["FTAR_NET_RAILS"] = _joined("rails", [rails] if isinstance(rails, str) else list(rails))
    if backup is not None:
        pairs = [backup] if isinstance(backup, str) else [f"{rail}={other}" for rail, other in backup.items()]
        wanted["FTAR_NET_BACKUP"] = _joined("backup", pairs)
    if timeout_s is not None:
        if not (math.isfinite(timeout_s) and 0 < timeout_s <= 3600):
            raise SettingsError(f"timeout_s={timeout_s}: not between 0 and 3600 seconds", hint="the default is 30")
        wanted["FTAR_NET_TIMEOUT_S"] = f"{timeout_s:g}"
    if token_file is not None:
        if not os.fspath(token_file):
            raise SettingsError("token_file='': an empty path", hint="leave token_file out for none")
        wanted["FTAR_TOKEN_FILE"] = os.path.abspath(token_file)
    if mode is not None:
        if mode not in MODES:
            raise SettingsError(f"mode={mode!r}: no such mode", hint=f"write one of: {', '.join(MODES)}")
        others = [o for o in current.get("FTAR_NET_OPTIONS", "").split(",") if o and not o.startswith("mode=")]
        wanted["FTAR_NET_OPTIONS"] = ",".join([*others, f"mode={mode}"])
    return wanted


def _joined(what: str, parts: list[str]) -> str:
    text = ",".join(parts)
    if not text or any(not part.strip() for part in text.split(",")):
        raise SettingsError(f"{what}={text!r}: an empty entry", hint=f"leave {what} out for the default")
    return text


def ports_in_words(ports: Sequence[RdmaPort]) -> str:
    """`RDMA ports are active: mlx5_0/1 (100 Gb/sec (4X EDR))`."""
    listed = ", ".join(f"{p.device}/{p.port} ({p.rate})" for p in ports)
    return f"{'RDMA ports are' if len(ports) > 1 else 'an RDMA port is'} active: {listed}"


@dataclass(frozen=True)
class Trial:
    """What the plugin made of a set of variables on this machine: its rails, or why it refused them."""

    devices: tuple[str, ...] = ()
    refused: str = ""


def trial(variables: Mapping[str, str], current: Mapping[str, str]) -> Trial:
    """Start the plugin with `variables` beside `current` in a process of its own, as NCCL would. Changes nothing."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ftar_core.ncclcheck"],
            env={**current, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TRIAL_S,
            check=False,
        )
        if done.returncode:  # a damaged file: the loader ends the process, by a signal or with a traceback
            return Trial(
                refused=f"{LIBRARY} cannot be loaded ({_ending(done)}); run: pip install --force-reinstall ftctl"
            )
        answer = json.loads(done.stdout)
        return Trial(tuple(map(str, answer["devices"])), str(answer["refused"]))
    except subprocess.TimeoutExpired:
        return Trial(refused=f"it did not start within {_TRIAL_S:g} s")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Trial(refused=f"it could not be tried: {error}")


def _ending(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode < 0:
        return signal.Signals(-done.returncode).name
    return (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]


@dataclass(frozen=True)
class NcclFound:
    """An NCCL library and the interface of ours that it loads. `version` is (major, minor, patch)."""

    path: Path
    version: tuple[int, int, int]

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))

    @property
    def abi(self) -> int | None:
        """12, 11 or 8; None: too old for any."""
        for first, abi in ABI_BY_VERSION:
            if self.version[:2] >= first:
                return abi
        return None

    @property
    def newer_than_known(self) -> bool:
        """True if this version's sources were not read: it may have dropped v12."""
        return self.version[:2] > _NEWEST_READ


_VERSION = re.compile(rb"NCCL version (\d+)\.(\d+)\.(\d+)")
_SONAME = "libnccl.so.2"
_CHUNK_BYTES = 1 << 22
_SYSTEM_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/usr/lib",
)


def find_nccl(search: Sequence[Path] | None = None) -> NcclFound | None:
    """The NCCL that a training process here would load: the nvidia-nccl package's, else a system library. No library is
    loaded: its version stands in it as text. `search` stands in for the usual places."""
    for path in _places() if search is None else search:
        if path.is_file() and (version := _version_in(path)) is not None:
            return NcclFound(path, version)
    return None


def _places() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        yield Path(place) / "nccl" / "lib" / _SONAME
    for folder in [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *_SYSTEM_FOLDERS]:
        if folder:
            yield Path(folder) / _SONAME


def _version_in(path: Path) -> tuple[int, int, int] | None:
    tail = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            if match := _VERSION.search(tail + chunk):
                return int(match[1]), int(match[2]), int(match[3])
            tail = chunk[-64:]
    return None
