"""A simulated GPU answers no call any more (NVML_ERROR_GPU_IS_LOST)."""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults.contract import Params
from agents.faults.gpus import StateFault
from agents.host.simgpus import SimulatedGpus


class GpuLost(StateFault):
    spec = SPECS["gpu-lost"]

    def values(self, gpus: SimulatedGpus, gpu: int, params: Params) -> dict[str, object]:
        return {"lost": 1}
