"""A simulated GPU counts memory errors, since its driver was loaded and in all."""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults.contract import Params
from agents.faults.gpus import StateFault
from agents.host.simgpus import SimulatedGpus, SimulationProblem


class GpuEcc(StateFault):
    spec = SPECS["gpu-ecc"]

    def values(self, gpus: SimulatedGpus, gpu: int, params: Params) -> dict[str, object]:
        kinds = {kind: int(params[kind]) for kind in ("corrected", "uncorrected")}
        if not any(kinds.values()):
            raise SimulationProblem("no error at all is asked for: --uncorrected N or --corrected N")
        keys = [f"ecc_{kind}{span}" for kind in kinds for span in ("", "_aggregate")]
        before = gpus.look(f"gpu.{gpu}.{key}" for key in keys)
        return {key: int(before[f"gpu.{gpu}.{key}"] or 0) + kinds[key.split("_")[1]] for key in keys}
