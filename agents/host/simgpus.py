"""Simulated GPUs: the state that the simulated NVML library (agents/simulated/nvml.cpp) reads, and how to change it.

A folder holds the library under NVML's name and the file `state`, lines of `key=value`. A change is written to a new
file that takes the old one's place, under a lock, so that a reader never sees half of one. Every change returns the
keys that it wrote with their old values (None: there was none); `restore` writes those back.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

ENVIRONMENT = "FTCTL_SIMULATED_GPUS"  # path of the state file, for the library and for who says "simulated"
LIBRARY = "libnvidia-ml-simulated.so"
SONAME = "libnvidia-ml.so.1"
MAX_GPUS = 64
KEPT_EVENTS = 64
# What NVML calls a throttle reason (nvmlClocksEventReasons), by the words that are shown.
THROTTLE = {
    "power cap": 0x4,
    "hardware slowdown": 0x8,
    "software thermal": 0x20,
    "hardware thermal": 0x40,
    "power brake": 0x80,
}

Old = dict[str, str | None]


class SimulationProblem(Exception):
    """The simulated GPUs cannot be made or changed so; the message says why."""


class Profile(msgspec.Struct, frozen=True):
    """A model of GPU: memory in MiB, power limit in watts, SM clock in MHz, temperature where it slows down."""

    name: str
    memory_mb: int
    power_limit_w: int
    clock_mhz: int
    slowdown_c: int
    nvlinks: int
    pcie_gen: int


# NVIDIA's data sheets (SXM5); the memory is what nvidia-smi shows of it.
PROFILES = {
    "h100": Profile("NVIDIA H100 80GB HBM3", 81_559, 700, 1980, 87, 18, 5),
    "h200": Profile("NVIDIA H200", 143_771, 700, 1980, 87, 18, 5),
}


class SimulatedGpus:
    """The state of one node's simulated GPUs; `path` is the state file. All methods raise SimulationProblem."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(
        cls, folder: Path, node: str, count: int, profile: str = "h100", missing: Sequence[str] = ()
    ) -> SimulatedGpus:
        """Make the folder's library and state. `missing`: functions that this "old driver" has not got."""
        if profile not in PROFILES:
            raise SimulationProblem(f"{profile}: no such GPU profile ({', '.join(PROFILES)})")
        if not 1 <= count <= MAX_GPUS:
            raise SimulationProblem(f"{count} simulated GPUs: not in 1 to {MAX_GPUS}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SONAME).write_bytes(_without(library_path().read_bytes(), missing))
        made = cls(folder / "state")
        made._write(_fresh(node, count, PROFILES[profile]))
        return made

    def environment(self) -> dict[str, str]:
        """What a process needs to load the simulated library in place of the driver's."""
        return {ENVIRONMENT: str(self.path), "LD_LIBRARY_PATH": str(self.path.parent)}

    def count(self) -> int:
        return int(self._read().get("gpus", "0"))

    def change(self, values: Mapping[str, object]) -> Old:
        with self._locked():
            state = self._read()
            old: Old = {key: state.get(key) for key in values}
            for key, value in values.items():
                if value is None:
                    state.pop(key, None)
                else:
                    state[key] = str(value)
            self._write(state)
        return old

    def look(self, keys: Iterable[str]) -> Old:
        state = self._read()
        return {key: state.get(key) for key in keys}

    def restore(self, old: Old, ours: Old | None = None) -> None:
        """Write `old` back; with `ours`, only where what was written then still stands."""
        with self._locked():
            state = self._read()
            for key, value in old.items():
                if ours is not None and state.get(key) != ours.get(key):
                    continue
                if value is None:
                    state.pop(key, None)
                else:
                    state[key] = value
            self._write(state)

    def of(self, gpu: int, values: Mapping[str, object]) -> Old:
        count = self.count()
        if not 0 <= gpu < count:
            raise SimulationProblem(f"GPU {gpu}: there are {count} (0 to {count - 1})")
        return self.change({f"gpu.{gpu}.{key}": value for key, value in values.items()})

    def set_lost(self, gpu: int, lost: bool = True) -> Old:
        return self.of(gpu, {"lost": int(lost)})

    def raise_xid(self, gpu: int, code: int) -> Old:
        """An event for whoever listens now, as the driver's are; nothing is there to be undone."""
        self.of(gpu, {})
        with self._locked():
            state = self._read()
            number = int(state.get("events", "0")) + 1
            state["events"] = str(number)
            state[f"event.{number}"] = f"{gpu} {code}"
            state.pop(f"event.{number - KEPT_EVENTS}", None)
            self._write(state)
        return {}

    def set_ecc(self, gpu: int, corrected: int = 0, uncorrected: int = 0) -> Old:
        """Errors since the driver was loaded."""
        return self.of(gpu, {"ecc_corrected": corrected, "ecc_uncorrected": uncorrected})

    def set_row_remap(
        self, gpu: int, correctable: int = 0, uncorrectable: int = 0, pending: bool = False, failure: bool = False
    ) -> Old:
        values = {"correctable": correctable, "uncorrectable": uncorrectable, "pending": int(pending)}
        return self.of(gpu, {f"remap_{k}": v for k, v in (values | {"failure": int(failure)}).items()})

    def set_throttle(self, gpu: int, reason: str = "hardware thermal", clock_mhz: int | None = None) -> Old:
        """`reason` is a key of THROTTLE. `clock_mhz`: the SM clock that is left."""
        if reason not in THROTTLE:
            raise SimulationProblem(f"{reason}: no such throttle reason ({', '.join(THROTTLE)})")
        clock = {} if clock_mhz is None else {"clock_sm": clock_mhz}
        return self.of(gpu, {"throttle": THROTTLE[reason], **clock})

    def set_temperature(self, gpu: int, celsius: float) -> Old:
        slowdown = float(self._read().get(f"gpu.{gpu}.temperature_slowdown", "87"))
        return self.of(gpu, {"temperature": celsius, "temperature_margin": int(slowdown - celsius)})

    def set_nvlink_error(self, gpu: int, link: int, errors: int = 1, up: bool = True) -> Old:
        if f"gpu.{gpu}.nvlink.{link}.up" not in self._read():
            raise SimulationProblem(f"GPU {gpu} has no NVLink {link}")
        return self.of(gpu, {f"nvlink.{link}.errors.0": errors, f"nvlink.{link}.up": int(up)})

    def set_recovery_action(self, gpu: int, action: int) -> Old:
        """NVML field 230: 0 none, 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset."""
        return self.of(gpu, {"field.230": action})

    def set_processes(self, gpu: int, pids: Sequence[int]) -> Old:
        return self.of(gpu, {"pids": ",".join(map(str, pids))})

    def hang(self, function: str, seconds: float) -> Old:
        """Calls of that NVML function take so long, or until this is undone."""
        return self.change({f"delay.{function}": seconds})

    def set_driver(self, loaded: bool) -> Old:
        """Read at nvmlInit: processes that use the library already keep it."""
        return self.change({"driver_loaded": int(loaded)})

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            lock = os.open(self.path.with_name("lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SimulationProblem(f"{self.path}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _read(self) -> dict[str, str]:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SimulationProblem(f"{self.path}: no state of simulated GPUs ({error})") from None
        return {key: value for key, equals, value in (line.partition("=") for line in lines) if equals}

    def _write(self, state: Mapping[str, str]) -> None:
        fresh = self.path.with_name(f"state.{os.getpid()}")
        try:
            fresh.write_text("".join(f"{key}={value}\n" for key, value in state.items()), encoding="utf-8")
            fresh.replace(self.path)
        except OSError as error:
            raise SimulationProblem(f"{self.path}: {error.strerror}") from None


def library_path() -> Path:
    spec = importlib.util.find_spec("ftar_core.native")  # where the build puts it
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / LIBRARY
        if path.is_file():
            return path
    raise SimulationProblem(f"{LIBRARY} is not in this installation: install ftctl on Linux with a C++20 compiler")


def _without(library: bytes, missing: Sequence[str]) -> bytes:
    """The library with symbols whose names nobody can ask for: their hashes no longer fit them."""
    for function in missing:
        name = b"\0" + function.encode() + b"\0"
        if name not in library:
            raise SimulationProblem(f"{function}: the simulated library has no such function")
        library = library.replace(name, b"\0" + b"-" * len(function) + b"\0")
    return library


def _fresh(node: str, count: int, profile: Profile) -> dict[str, str]:
    memory = profile.memory_mb * 2**20
    state: dict[str, object] = {"gpus": count, "driver_loaded": 1, "driver_version": "570.124.06", "events": 0}
    one: dict[str, object] = {
        "name": profile.name,
        "memory_total": memory,
        "memory_used": memory // 2,
        "utilization": 90,
        "power_mw": profile.power_limit_w * 800,
        "power_limit_mw": profile.power_limit_w * 1000,
        "temperature": 55,
        "temperature_slowdown": profile.slowdown_c,
        "temperature_margin": profile.slowdown_c - 55,
        "clock_sm": profile.clock_mhz,
        "clock_sm_max": profile.clock_mhz,
        "throttle": 0,
        "violation_thermal_ns": 0,
        "violation_power_ns": 0,
        "pcie_gen": profile.pcie_gen,
        "pcie_gen_max": profile.pcie_gen,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "pcie_replays": 0,
        "fabric_state": 3,  # completed
        "fabric_status": 0,
        "field.230": 0,
        "pids": "",
    }
    one |= {f"ecc_{kind}{span}": 0 for kind in ("corrected", "uncorrected") for span in ("", "_aggregate")}
    one |= {f"remap_{word}": 0 for word in ("correctable", "uncorrectable", "pending", "failure")}
    for link in range(profile.nvlinks):
        one |= {f"nvlink.{link}.up": 1, **{f"nvlink.{link}.errors.{kind}": 0 for kind in range(4)}}
    for gpu in range(count):
        state[f"gpu.{gpu}.uuid"] = f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node}/gpu{gpu}')}"
        state[f"gpu.{gpu}.pci"] = f"00000000:{0x10 + gpu:02x}:00.0"
        state |= {f"gpu.{gpu}.{key}": value for key, value in one.items()}
    return {key: str(value) for key, value in state.items()}
