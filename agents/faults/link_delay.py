"""What a rail sends arrives later: a detour, a congested switch (netem)."""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults.contract import Params
from agents.faults.queues import HELD_PACKETS, Queue
from agents.host.qdiscs import netem_options


class LinkDelay(Queue):
    spec = SPECS["link-delay"]
    discipline = "netem"

    def options(self, params: Params) -> tuple[bytes, str]:
        delay, jitter = float(params["delay_ms"]), float(params["jitter_ms"])
        words = f"delays what it sends by {delay:g} ms" + (f", {jitter:g} ms more or less" if jitter else "")
        return netem_options(HELD_PACKETS, delay_ms=delay, jitter_ms=jitter), words
