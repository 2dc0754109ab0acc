"""The process that talks to NVML, because a driver in trouble can hang a caller for ever (nobody can kill a thread).

    python -m agents.monitors.nvml_child

Reads lines from standard input; each is answered by one line of JSON: {"gpus": [...], "note": "..."}. The first answer
comes by itself. Without the library, a driver or a GPU it says so and ends: there is nothing to watch then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class GpuReading(msgspec.Struct, frozen=True):
    """One GPU; None for what it does not tell. Memory in MiB, power in watts, temperature in degrees Celsius."""

    index: int
    uuid: str
    name: str
    temperature_c: float | None = None
    utilization_percent: float | None = None
    memory_used_mb: float | None = None
    memory_total_mb: float | None = None
    power_w: float | None = None
    lost: str = ""  # why it cannot be read


class GpuAnswer(msgspec.Struct, frozen=True):
    gpus: tuple[GpuReading, ...] = ()
    note: str = ""
    final: bool = False  # this process ends: asking again makes no sense


def read_all(nvml: Any) -> GpuAnswer:
    """`nvml` is the pynvml module (its functions have no types), initialised."""
    return GpuAnswer(tuple(_read_one(nvml, index) for index in range(nvml.nvmlDeviceGetCount())))


def _read_one(nvml: Any, index: int) -> GpuReading:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:
        return GpuReading(index, "", "", lost=str(error))
    memory = _maybe(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    use = _maybe(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    power_mw = _maybe(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    temperature = _maybe(nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    return GpuReading(
        index=index,
        uuid=uuid,
        name=name,
        temperature_c=None if temperature is None else float(temperature),
        utilization_percent=None if use is None else float(use.gpu),
        memory_used_mb=None if memory is None else memory.used / 2**20,
        memory_total_mb=None if memory is None else memory.total / 2**20,
        power_w=None if power_mw is None else power_mw / 1000,
    )


def _maybe(nvml: Any, read: Callable[[], T]) -> T | None:
    """Many GPUs do not support every reading; a GPU that is lost is another matter and is said by the first call."""
    try:
        return read()
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _say(answer: GpuAnswer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def main() -> int:
    os.nice(5)
    try:
        import pynvml
    except ImportError:
        _say(GpuAnswer(note="no GPUs (the nvidia-ml-py package is not installed)", final=True))
        return 0
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        missing = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        words = "NVML not found" if error.value == missing else str(error)
        _say(GpuAnswer(note=f"no GPUs ({words})", final=True))
        return 0
    if count == 0:
        _say(GpuAnswer(note="no GPUs (NVML lists none)", final=True))
        return 0
    _say(read_all(pynvml))
    for _line in sys.stdin.buffer:
        try:
            answer = read_all(pynvml)
        except pynvml.NVMLError as error:
            answer = GpuAnswer(note=f"NVML: {error}")
        _say(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
