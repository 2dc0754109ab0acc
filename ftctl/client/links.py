"""Links as operators think of them: which rail carries what. Pure, from what the agents say.

A training rank tells its links to its agent, and so does the status socket of its process, as that of any process with
links. They are the same links: the socket's view counts, the rank's own report stands in where there is no socket.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agents.api.models import LinkProcessView, LinkRailView, LinkRow, LinkView, NicView, NodeView, RankView
from ftctl.client.cluster import Snapshot

STATES = ("UP", "DOWN", "PROBING", "HOLD", "SILENT")
_WORST_FIRST = ("DOWN", "SILENT", "PROBING", "HOLD", "UP", "")


@dataclass(frozen=True)
class RailLinks:
    """All connections of a node over one NIC, at this end.

    `state` is the worst of them. `moved`: connections that prefer this rail and send over another now, by its name.
    """

    links: int = 0
    up: int = 0
    active: int = 0
    moved: dict[str, int] = field(default_factory=dict)
    state: str = ""
    reason: str = ""
    since_s: float = 0.0
    flaps: int = 0
    bytes: int = 0
    hold_left_s: float = 0.0


def over(view: NodeView, nic: NicView) -> RailLinks:
    if not view.link_processes and not view.ranks:
        return RailLinks()
    rails = [
        rail for process in view.link_processes for rail in process.rails if (rail.device or rail.rail) == nic.name
    ]
    return _sum(
        [*rails, *(_as_rail(link) for rank in _only_reported(view) for link in rank.links if link.rail == nic.name)]
    )


def of_plugin(view: NodeView) -> list[LinkProcessView]:
    """Processes that no replica's row shows: those whose links are NCCL's."""
    return [process for process in view.link_processes if process.kind != "ring"]


def sentence(links: RailLinks) -> str:
    """`3/4 links, 1 moved to rail1, 2 flaps, hold-down 812ms`; empty without links."""
    from ftctl.durations import show

    if not links.links:
        return ""
    parts = [f"{links.up}/{links.links} links"]
    parts += [f"{count} moved to {rail}" for rail, count in sorted(links.moved.items())]
    if links.flaps:
        parts.append(f"{links.flaps} flap{'s' if links.flaps > 1 else ''}")
    if links.hold_left_s > 0:
        parts.append(f"hold-down {show(links.hold_left_s)}")
    return ", ".join(parts)


def peers(snapshot: Snapshot) -> dict[str, str]:
    """Address of a NIC -> NODE/NIC, for the NICs that the agents know."""
    return {
        address.partition("/")[0]: f"{view.name}/{nic.name}"
        for view in snapshot.views()
        for nic in view.nics
        for address in nic.addresses
    }


def peer_name(row: LinkRow, known: dict[str, str]) -> str:
    """A replica for a ring; for the plugin the node that has the address, or the address."""
    if row.kind == "ring" or not row.address:
        return row.peer
    return known.get(row.address, row.address).partition("/")[0]


def _only_reported(view: NodeView) -> list[RankView]:
    seen = {process.pid for process in view.link_processes if process.kind == "ring"}
    return [rank for rank in view.ranks if rank.pid not in seen]


def _as_rail(link: LinkView) -> LinkRailView:
    return LinkRailView(
        rail=link.rail,
        device="",
        address="",
        links=1,
        up=int(link.state == "UP"),
        states={link.state: 1},
        state=link.state,
        reason=link.reason,
        since_s=link.since_s,
        active=int(link.active),
        flaps=link.flaps,
        bytes=link.bytes,
    )


def _sum(rails: list[LinkRailView]) -> RailLinks:
    used = [rail for rail in rails if rail.links]
    if not used:
        return RailLinks()
    first = min(used, key=lambda rail: (_rank_of(rail.state), -rail.since_s))
    moved: dict[str, int] = {}
    for rail in used:
        for name, count in rail.moved.items():
            moved[name] = moved.get(name, 0) + count
    return RailLinks(
        links=sum(rail.links for rail in used),
        up=sum(rail.up for rail in used),
        active=sum(rail.active for rail in used),
        moved=moved,
        state=first.state,
        reason=first.reason,
        since_s=first.since_s,
        flaps=max(rail.flaps for rail in used),
        bytes=sum(rail.bytes for rail in used),
        hold_left_s=max(rail.hold_left_s for rail in used),
    )


def _rank_of(state: str) -> int:
    return _WORST_FIRST.index(state) if state in _WORST_FIRST else 0
