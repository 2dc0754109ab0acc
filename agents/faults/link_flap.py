"""A rail that goes down and comes back, again and again: a loose connector, a transceiver that overheats.

Each time down is a link-down with its own record of what the kernel forgets (read anew before each, so that what others
changed in between stays changed), and each return brings that back.
"""

from __future__ import annotations

from agents.api.faultspecs import SPECS
from agents.faults import nics
from agents.faults.contract import Params, Target
from agents.faults.link_down import LinkDown, LinkDownUndo
from agents.faults.rhythm import Rhythm
from agents.host.errors import HostError
from agents.host.machine import Machine


class LinkFlapUndo(LinkDownUndo, frozen=True, forbid_unknown_fields=True):
    rhythm: Rhythm = Rhythm(1.0, 0.5)


class LinkFlap(LinkDown):
    spec = SPECS["link-flap"]
    undo_type = LinkFlapUndo

    def plan(self, machine: Machine, target: Target, params: Params) -> LinkFlapUndo:
        rhythm = Rhythm(
            float(params["period_ms"]) / 1000.0,
            float(params["down_percent"]) / 100.0,
            float(params["jitter_percent"]) / 100.0,
            int(params["seed"]),
        )
        return _with(super().plan(machine, target, params), rhythm)

    def rhythm(self, undo: LinkDownUndo) -> Rhythm | None:
        return undo.rhythm if isinstance(undo, LinkFlapUndo) else None

    def again(self, machine: Machine, undo: LinkDownUndo) -> LinkDownUndo:
        nic = nics.same(machine, undo)
        if nic is None or not isinstance(undo, LinkFlapUndo):
            raise HostError(f"set {undo.nic} down", 0, "it has vanished")
        return _with(super().plan(machine, Target("", nic.name), {}), undo.rhythm)


def _with(record: LinkDownUndo, rhythm: Rhythm) -> LinkFlapUndo:
    return LinkFlapUndo(**{name: getattr(record, name) for name in record.__struct_fields__}, rhythm=rhythm)
