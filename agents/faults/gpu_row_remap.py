"""A simulated GPU remaps a row of its memory: it waits for the next reset, or could not."""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults.contract import Params
from agents.faults.gpus import StateFault
from agents.host.simgpus import SimulatedGpus


class GpuRowRemap(StateFault):
    spec = SPECS["gpu-row-remap"]

    def values(self, gpus: SimulatedGpus, gpu: int, params: Params) -> dict[str, object]:
        before = gpus.look([f"gpu.{gpu}.remap_uncorrectable"])[f"gpu.{gpu}.remap_uncorrectable"]
        return {f"remap_{params['outcome']}": 1, "remap_uncorrectable": int(before or 0) + 1}
