"""A rail that sends slower than it should: a port that trained at a lower speed, a shared uplink (tbf)."""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults.contract import Params
from agents.faults.queues import Queue
from agents.host.qdiscs import tbf_options


class LinkRate(Queue):
    spec = SPECS["link-rate"]
    discipline = "tbf"

    def options(self, params: Params) -> tuple[bytes, str]:
        rate, queue = float(params["mbit"]), float(params["queue_ms"])
        return tbf_options(rate, queue), f"sends at most {rate:g} Mbit/s"
