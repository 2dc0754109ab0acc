"""A call of the simulated driver's library does not return while the fault lasts."""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults.contract import Params
from agents.faults.gpus import StateFault
from agents.host.simgpus import SimulatedGpus

FOR_EVER_S = 86_400


class NvmlHang(StateFault):
    spec = SPECS["nvml-hang"]

    def values(self, gpus: SimulatedGpus, gpu: int, params: Params) -> dict[str, object]:
        return {f".delay.{params['call']}": FOR_EVER_S}
