"""An NVLink of a simulated GPU counts errors, and may be down."""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults.contract import Params
from agents.faults.gpus import StateFault
from agents.host.simgpus import SimulatedGpus, SimulationProblem


class NvlinkError(StateFault):
    spec = SPECS["nvlink-error"]

    def values(self, gpus: SimulatedGpus, gpu: int, params: Params) -> dict[str, object]:
        link = f"nvlink.{params['link']}"
        count, up = f"{link}.errors.0", f"{link}.up"
        before = gpus.look([f"gpu.{gpu}.{count}", f"gpu.{gpu}.{up}"])
        if before[f"gpu.{gpu}.{up}"] is None:
            raise SimulationProblem(f"GPU {gpu} has no NVLink {params['link']}")
        errors = int(before[f"gpu.{gpu}.{count}"] or 0) + int(params["errors"])
        return {count: errors, **({up: 0} if params["down"] else {})}
