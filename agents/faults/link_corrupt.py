"""A bit of some frames is wrong: a dying optic, a bad lane (netem).

netem fills in the checksum before it damages a frame, so the receiver finds the damage and drops the frame. Packet
rules cannot do this in its place: a checksum that hardware is still to fill in would be made to fit the damage.
"""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults.contract import Params
from agents.faults.queues import HELD_PACKETS, Queue
from agents.host.qdiscs import netem_options


class LinkCorrupt(Queue):
    spec = SPECS["link-corrupt"]
    discipline = "netem"

    def options(self, params: Params) -> tuple[bytes, str]:
        percent = float(params["percent"])
        return netem_options(HELD_PACKETS, corrupt=percent / 100.0), f"damages {percent:g} % of what it sends"
