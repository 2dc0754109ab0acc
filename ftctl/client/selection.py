"""From what the user wrote (node[0-3], --rail 1) to nodes and network devices."""

from __future__ import annotations

from collections.abc import Mapping

from agents.api.models import NodeView
from ftctl import hostlist
from ftctl.config import Inventory
from ftctl.errors import CliError, UsageProblem


def nodes_named(inventory: Inventory, text: str | None, option: str = "--node") -> list[str]:
    """The nodes of a hostlist, all without one. Raises UsageProblem for a name the inventory does not have."""
    if text is None:
        return [node.name for node in inventory.nodes]
    try:
        names = hostlist.expand(text)
    except hostlist.HostlistError as error:
        raise UsageProblem(option, str(error)) from None
    return [inventory.node(name).name for name in names]


def rail_device(view: NodeView, index: int) -> str:
    """The network device of rail number `index` (from 0) of a node, in the order in which its agent lists them."""
    rails = [nic.name for nic in view.nics if nic.role == "rail"]
    if not 0 <= index < len(rails):
        have = f"rails 0 to {len(rails) - 1}: {', '.join(rails)}" if rails else "no rails declared"
        raise UsageProblem(f"rail {index} of {view.name}", f"unknown (it has {have})", "ftctl status")
    return rails[index]


def nodes_of_replica(views: Mapping[str, NodeView | CliError], replica: str, rank: int | None) -> list[str]:
    """The nodes that have processes of it (of that rank). Raises CliError if none has, or an agent that may have some
    did not answer and none of the others has."""
    found = [
        node
        for node, view in views.items()
        if isinstance(view, NodeView)
        and any(
            name == replica and (rank is None or number == rank)
            for name, number in (
                *((p.replica, p.rank) for p in view.processes if p.pid is not None),
                *((r.replica, r.rank) for r in view.ranks),
            )
        )
    ]
    if not found:
        for view in views.values():
            if isinstance(view, CliError):
                raise view
        what = f"replica {replica}" + ("" if rank is None else f", rank {rank}")
        raise UsageProblem(what, "no node has a process of it now", "ftctl ranks shows what runs where")
    return found


def rail_addresses(views: Mapping[str, NodeView | CliError]) -> list[str]:
    """All addresses of the rails of these nodes. Raises CliError if an agent did not answer, or a node has none."""
    found: list[str] = []
    for node, view in views.items():
        if isinstance(view, CliError):
            raise view
        own = [a.partition("/")[0] for nic in view.nics if nic.role == "rail" for a in nic.addresses]
        # Link-local addresses are made from the MAC address and good for one rail only.
        own = [address for address in own if not address.startswith("fe80:")]
        if not own:
            raise UsageProblem(f"node {node}", "its rails have no addresses", "ftctl status")
        found += own
    return found
