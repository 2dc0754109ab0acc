"""A simulated GPU computes for somebody else."""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults.contract import Params
from agents.faults.gpus import StateFault
from agents.host.simgpus import SimulatedGpus


class GpuBusy(StateFault):
    spec = SPECS["gpu-busy"]

    def values(self, gpus: SimulatedGpus, gpu: int, params: Params) -> dict[str, object]:
        return {"utilization": int(params["percent"])}
