"""Memory of a simulated GPU is taken by somebody else."""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults.contract import Params
from agents.faults.gpus import StateFault
from agents.host.simgpus import SimulatedGpus


class GpuMemHog(StateFault):
    spec = SPECS["gpu-mem-hog"]

    def values(self, gpus: SimulatedGpus, gpu: int, params: Params) -> dict[str, object]:
        key = f"gpu.{gpu}.memory_total"
        total = int(gpus.look([key])[key] or 0)
        return {"memory_used": int(total * float(params["percent"]) / 100)}
