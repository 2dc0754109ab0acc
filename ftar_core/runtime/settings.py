"""The environment of a rank, read once and checked: the one reader of settings on the training side.

Every wrong value is a SettingsError that names the variable, the reason and the fix, before any socket is opened: a
typing error found after ten minutes in a queue costs more than all these checks together.
"""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ftar_core.errors import SettingsError
from ftar_core.runtime.rails import Interfaces, Rail, interfaces, parse_rails
from ftar_core.wire import breakpoints
from ftar_core.wire.address import Address, parse_address
from ftar_core.wire.ids import valid_name
from ftar_core.wire.tokens import read_token

ROTATION = 64  # steps
MODES = ("backup", "stripe")
DATA_PLANES = ("host", "nccl")
DEFAULT_RAILS = "lo=127.0.0.1"
KNOWN = (
    "FTAR_AGENT",
    "FTAR_BREAKPOINTS",
    "FTAR_CATCHUP_MBIT",
    "FTAR_COORDINATOR",
    "FTAR_DATA_PLANE",
    "FTAR_JOB",
    "FTAR_JOURNAL",
    "FTAR_LEADER",
    "FTAR_MODE",
    "FTAR_NCCL_LIBRARY",
    "FTAR_NODE",
    "FTAR_RAILS",
    "FTAR_REPLAY_BUFFER",
    "FTAR_REPLICA",
    "FTAR_ROTATION",
    "FTAR_REDUCE",
    "FTAR_TOKEN_FILE",
)
# As near to a known name as FTAR_RAIL is to FTAR_RAILS; other names are left to the programs they belong to.
_TYPING_ERROR = 0.9
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Settings:
    """What a rank knows about its place in the job (ARCHITECTURE.md, "Environment of a rank")."""

    coordinator: Address
    job: str
    replica: str
    token: bytes = field(repr=False)
    rails: tuple[Rail, ...]
    node: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master: Address | None = None  # torch's own rendezvous inside the replica (MASTER_ADDR, MASTER_PORT)
    leader: Address | None = None  # where rank 0 listens for the other ranks; else they find it through torch's store
    agent: Path | None = None  # the agent's ranks socket
    reduce: str = "host"  # where gradients of a GPU are added up: "host" or "device"
    mode: str | None = None  # what rails do: "backup" or "stripe"; None: the engine's default
    journal: Path | None = None  # directory for the JSON lines of each step
    breakpoints: tuple[breakpoints.Spec, ...] | None = None  # where to fail on purpose; None: nowhere, ever
    catchup_mbit: float = 0.0  # at most so much is given to replicas that catch up; 0: no limit
    rotation: int = ROTATION  # steps in which the whole state is compared with the other replicas', once
    replay_buffer: int = 0  # bytes of steps that wait to be replayed; 0: a share of the memory
    data_plane: str = "host"  # what moves gradients between replicas: our links, or "nccl"
    nccl_library: str = ""  # path of a libnccl.so.2; empty: torch's
    nccl: str = ""  # its version, once it is loaded: replicas must have the same
    coordinator_wait_s: float = 600.0  # until a Welcome says otherwise


def read_settings(
    environment: Mapping[str, str] | None = None, look: Callable[[], Interfaces] = interfaces
) -> Settings:
    """Settings from FTAR_* and from torchrun's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which mean
    the ranks of one replica. Raises SettingsError.

    `environment` stands in for os.environ, `look` for the machine's network interfaces.
    """
    env = os.environ if environment is None else environment
    _typing_errors(env)
    world_size = _number(env, "WORLD_SIZE", default=1, lowest=1)
    rank = _number(env, "RANK", default=0, lowest=0)
    local_rank = _number(env, "LOCAL_RANK", default=0, lowest=0)
    if rank >= world_size:
        raise SettingsError(
            f"RANK={rank}: WORLD_SIZE is {world_size}, so the highest rank is {world_size - 1}",
            hint="start the ranks with torchrun, or set both by hand (RANK counts inside one replica)",
        )
    return Settings(
        coordinator=_coordinator(env),
        job=_name(env, "FTAR_JOB"),
        replica=_name(env, "FTAR_REPLICA"),
        token=_token(env),
        rails=parse_rails(env.get("FTAR_RAILS", "").strip() or DEFAULT_RAILS, look),
        node=_node(env),
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        mode=_mode(env),
        reduce=_reduce(env),
        master=_master(env) if world_size > 1 else None,
        leader=_leader(env) if world_size > 1 else None,
        agent=_agent(env),
        journal=_journal(env),
        breakpoints=read_breakpoints(env, breakpoints.rank_points()),
        catchup_mbit=_rate(env),
        rotation=_number(env, "FTAR_ROTATION", default=ROTATION, lowest=1),
        replay_buffer=_size(env),
        data_plane=data_plane(env.get("FTAR_DATA_PLANE", "").strip() or "host", "FTAR_DATA_PLANE="),
        nccl_library=env.get("FTAR_NCCL_LIBRARY", "").strip(),
    )


def data_plane(text: str, said: str = "data_plane=") -> str:
    """Raises SettingsError for one that there is not."""
    if text not in DATA_PLANES:
        raise SettingsError(f"{said}{text}: no such data plane", hint=f"write one of: {', '.join(DATA_PLANES)}")
    return text


def _required(env: Mapping[str, str], variable: str, example: str) -> str:
    value = env.get(variable, "").strip()
    if not value:
        raise SettingsError(f"{variable} is not set", hint=f"set it, for example: export {variable}={example}")
    return value


def _coordinator(env: Mapping[str, str]) -> Address:
    text = _required(env, "FTAR_COORDINATOR", "127.0.0.1:7600")
    try:
        return parse_address(text)
    except ValueError as error:
        raise SettingsError(
            f"FTAR_COORDINATOR={error}", hint="write the address that ftar-coordinator listens on, HOST:PORT"
        ) from None


def _leader(env: Mapping[str, str]) -> Address | None:
    text = env.get("FTAR_LEADER", "").strip()
    if not text:
        return None
    try:
        return parse_address(text)
    except ValueError as error:
        raise SettingsError(
            f"FTAR_LEADER={error}", hint="write an address of rank 0 and a free port, HOST:PORT, or unset it"
        ) from None


def _master(env: Mapping[str, str]) -> Address | None:
    """None if they are not set: a script may make its process group in another way."""
    host, port = env.get("MASTER_ADDR", "").strip(), env.get("MASTER_PORT", "").strip()
    if not host or not port:
        return None
    try:
        return parse_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except ValueError as error:
        raise SettingsError(
            f"MASTER_ADDR={host}, MASTER_PORT={port}: {error}",
            hint="torchrun sets them; by hand: the host of rank 0 and a free port, the same for all ranks of a replica",
        ) from None


def _name(env: Mapping[str, str], variable: str) -> str:
    value = _required(env, variable, "demo" if variable == "FTAR_JOB" else "r0")
    if not valid_name(value):
        raise SettingsError(
            f"{variable}={value!r}: not a valid name",
            hint="use 1 to 63 of a-z, 0-9, '.', '_' and '-', with a letter or digit at both ends",
        )
    return value


def _token(env: Mapping[str, str]) -> bytes:
    return read_token(Path(_required(env, "FTAR_TOKEN_FILE", "/path/to/token")), "FTAR_TOKEN_FILE")


def _node(env: Mapping[str, str]) -> str:
    given = env.get("FTAR_NODE", "").strip()
    if given:
        return _name(env, "FTAR_NODE")
    host = socket.gethostname().lower().partition(".")[0]
    if not valid_name(host):
        raise SettingsError(
            f"this host's name {host!r} is not a valid node name", hint="set one, for example: export FTAR_NODE=node0"
        )
    return host


def _mode(env: Mapping[str, str]) -> str | None:
    text = env.get("FTAR_MODE", "").strip()
    if text and text not in MODES:
        raise SettingsError(f"FTAR_MODE={text}: no such mode", hint=f"write one of: {', '.join(MODES)}, or unset it")
    return text or None


def _reduce(env: Mapping[str, str]) -> str:
    text = env.get("FTAR_REDUCE", "").strip() or "host"
    if text not in {"host", "device"}:
        raise SettingsError(f"FTAR_REDUCE={text}: no such place", hint="write host or device, or unset it (host)")
    return text


def _agent(env: Mapping[str, str]) -> Path | None:
    text = env.get("FTAR_AGENT", "").strip()
    if not text:
        return None
    if len(os.fsencode(text)) > 107:  # sun_path of unix(7), without the final zero byte
        raise SettingsError(
            f"FTAR_AGENT={text}: longer than the 107 bytes of a Unix socket's path",
            hint="put the agent's ranks socket into a directory with a shorter path, such as /run",
        )
    return Path(text)  # it need not exist: the agent may start later


def _journal(env: Mapping[str, str]) -> Path | None:
    text = env.get("FTAR_JOURNAL", "").strip()
    if not text:
        return None
    path = Path(text)
    if not path.is_dir():
        what = "not a directory" if path.exists() else "no such directory"
        raise SettingsError(f"FTAR_JOURNAL={text}: {what}", hint=f"run: mkdir -p {text}, or unset FTAR_JOURNAL")
    if not os.access(path, os.W_OK | os.X_OK):
        raise SettingsError(f"FTAR_JOURNAL={text}: this user may not write there", hint="choose another directory")
    return path


def read_breakpoints(env: Mapping[str, str], points: tuple[str, ...]) -> tuple[breakpoints.Spec, ...] | None:
    """FTAR_BREAKPOINTS; None if it is not set. Raises SettingsError."""
    text = env.get("FTAR_BREAKPOINTS", "").strip()
    if not text:
        return None
    try:
        return breakpoints.parse(text, points)
    except ValueError as error:
        raise SettingsError(
            f"FTAR_BREAKPOINTS: {error}", hint="write POINT[,step=N][,action=kill|stop|raise|sleep]..., or unset it"
        ) from None


def _rate(env: Mapping[str, str]) -> float:
    text = env.get("FTAR_CATCHUP_MBIT", "").strip()
    try:
        value = float(text or 0)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e7 or (text and value == 0):
        raise SettingsError(
            f"FTAR_CATCHUP_MBIT={text!r}: a rate in Mbit/s is expected",
            hint="export FTAR_CATCHUP_MBIT=2000, or unset it for no limit",
        )
    return value


def _size(env: Mapping[str, str]) -> int:
    text = env.get("FTAR_REPLAY_BUFFER", "").strip().upper()
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "")
    if text and not (number.isascii() and number.isdigit() and 0 < int(number) < 1 << 40):
        raise SettingsError(
            f"FTAR_REPLAY_BUFFER={text!r}: a size such as 512M or 8G is expected",
            hint="unset it for a quarter of the memory that is available",
        )
    return int(number) * _UNITS.get(unit, 1) if text else 0


def _number(env: Mapping[str, str], variable: str, *, default: int, lowest: int) -> int:
    text = env.get(variable, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or int(text) < lowest:
        by_hand = "" if variable.startswith("FTAR_") else "torchrun sets it; by hand: "
        raise SettingsError(
            f"{variable}={text!r}: a whole number of at least {lowest} is expected",
            hint=f"{by_hand}export {variable}={default}, or unset it",
        )
    return int(text)


def _typing_errors(env: Mapping[str, str]) -> None:
    for variable in sorted(env):
        if not variable.startswith("FTAR_") or variable in KNOWN:
            continue
        near = difflib.get_close_matches(variable, KNOWN, n=1, cutoff=_TYPING_ERROR)
        if near:
            raise SettingsError(
                f"{variable} is no setting of ours, {near[0]} is", hint=f"rename it: export {near[0]}=..., or unset it"
            )
