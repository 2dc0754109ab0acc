"""A simulated GPU runs at a lower clock and says why."""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults.contract import Params
from agents.faults.gpus import StateFault
from agents.host.simgpus import THROTTLE, SimulatedGpus


class GpuThrottle(StateFault):
    spec = SPECS["gpu-throttle"]

    def values(self, gpus: SimulatedGpus, gpu: int, params: Params) -> dict[str, object]:
        return {"throttle": THROTTLE[str(params["cause"])], "clock_sm": int(params["clock_mhz"])}
