"""Some frames overtake others: two paths of unequal length (netem: those that overtake are not delayed)."""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults.contract import Params
from agents.faults.queues import HELD_PACKETS, Queue
from agents.host.qdiscs import netem_options


class LinkReorder(Queue):
    spec = SPECS["link-reorder"]
    discipline = "netem"

    def options(self, params: Params) -> tuple[bytes, str]:
        percent, delay = float(params["percent"]), float(params["delay_ms"])
        words = f"sends {percent:g} % of its frames ahead of others, which wait {delay:g} ms"
        return netem_options(HELD_PACKETS, delay_ms=delay, reorder=percent / 100.0, gap=1), words
