"""The power limit of a real GPU, through NVML: what a fault may lower, because its old value can be read and put back.

Clocks are locked in the same way, but nothing tells how they were locked before. NVML may hang in the driver, so that
each call is made in a process of its own, with a deadline:

    python -m agents.host.gpupower UUID [MILLIWATTS]
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

from agents.host.errors import HostError

DEADLINE_S = 15.0  # nvmlInit loads the driver when nothing has used the GPUs yet
MAX_ANSWER = 4096


class PowerLimit(msgspec.Struct, frozen=True):
    """In milliwatts; `least` and `most` are what the GPU accepts."""

    limit: int = 0
    least: int = 0
    most: int = 0
    error: str = ""


def read(uuid: str) -> PowerLimit:
    """Raises HostError."""
    return _ask(f"read the power limit of {uuid}", uuid)


def write(uuid: str, milliwatts: int) -> PowerLimit:
    """The limit as it is then. Raises HostError."""
    return _ask(f"set the power limit of {uuid}", uuid, str(milliwatts))


def _ask(operation: str, *arguments: str) -> PowerLimit:
    command = [sys.executable, "-m", "agents.host.gpupower", *arguments]
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise HostError.of(operation, error) from None
    try:
        said, _ = child.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        child.kill()  # it may stay in the kernel with the driver; nobody waits for it
        raise HostError(operation, 0, f"NVML did not answer within {DEADLINE_S:g} s") from None
    try:
        answer = msgspec.json.decode(said[:MAX_ANSWER], type=PowerLimit)
    except (msgspec.DecodeError, ValueError):
        raise HostError(operation, 0, f"its process ended with {child.returncode} and no answer") from None
    if answer.error:
        raise HostError(operation, 0, answer.error)
    return answer


def _serve(uuid: str, milliwatts: str | None) -> PowerLimit:
    try:
        import pynvml
    except ImportError:
        return PowerLimit(error="the nvidia-ml-py package is not installed")
    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        if milliwatts is not None:
            pynvml.nvmlDeviceSetPowerManagementLimit(gpu, int(milliwatts))
        least, most = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu)
        return PowerLimit(int(pynvml.nvmlDeviceGetPowerManagementLimit(gpu)), int(least), int(most))
    except pynvml.NVMLError as error:
        return PowerLimit(error=str(error))


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)))
