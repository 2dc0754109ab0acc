"""What an agent is told of the other nodes before it injects, for the limits of its blast radius. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agents.api.blast import FELT_BY_NOBODY, felt
from agents.api.faultspecs import SPECS
from agents.api.models import FaultView, InjectRequest, NodeView
from agents.api.safety import FleetSaid, HitSaid

MAX_HITS, MAX_SILENT = 4096, 10_000  # as FleetSaid has them: one more is as good as so many


def knows_limits(view: NodeView | None) -> bool:
    """Its agent takes what is said here; an older one refuses a key that it does not know."""
    return view is not None and view.blast is not None


def said(views: Mapping[str, NodeView | None], more: Iterable[HitSaid] = ()) -> FleetSaid:
    """`views`: all nodes of the inventory, None for those that are silent. `more`: faults that are just asked for."""
    hits = [hit for view in views.values() if view is not None for hit in hits_on(view)]
    known = {hit.id for hit in hits}
    hits += [hit for hit in more if hit.id not in known]
    silent = [name for name, view in views.items() if view is None]
    return FleetSaid(nodes=len(views), silent=silent[:MAX_SILENT], hits=hits[:MAX_HITS])


def hits_on(view: NodeView) -> list[HitSaid]:
    here = replicas_on(view)
    counting = (fault for fault in view.faults if not fault.state.over and fault.kind not in FELT_BY_NOBODY)
    return [HitSaid(id=f.id, kind=f.kind, node=view.name, replicas=_felt(f, here)) for f in counting]


def of_request(request: InjectRequest, node: str, view: NodeView | None) -> HitSaid | None:
    """The fault that is asked for, as the other nodes are told of it. None: it hits nothing."""
    if request.kind in FELT_BY_NOBODY:
        return None
    spec = SPECS.get(request.kind)
    target = spec.target if spec is not None else "node"
    hit = felt(request.kind, target, request.replica or "", replicas_on(view) if view is not None else ())
    return HitSaid(id=request.request_id[:64], kind=request.kind, node=node, replicas=list(hit[:256]))


def replicas_on(view: NodeView) -> tuple[str, ...]:
    return tuple(sorted({process.replica for process in view.processes} | {rank.replica for rank in view.ranks}))


def _felt(fault: FaultView, here: tuple[str, ...]) -> list[str]:
    spec = SPECS.get(fault.kind)
    target = spec.target if spec is not None else "node"
    named = fault.target.split("/")[1:2] if target == "replica" else []
    return list(felt(fault.kind, target, named[0] if named else "", here)[:256])
