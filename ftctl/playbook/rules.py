"""What a playbook asks of every fault of its run beside the fault itself: the agents hold to it."""

from __future__ import annotations

from dataclasses import dataclass

from agents.api.safety import BlastSaid, ProtectSaid
from ftctl.playbook.schema import Playbook


@dataclass(frozen=True)
class Rules:
    """None of what a playbook does not say is sent, so that an older agent takes the request."""

    protect: ProtectSaid | None = None
    blast: BlastSaid | None = None


def rules_of(playbook: Playbook, file: str) -> Rules:
    """`file`: what a refusal names."""
    source = file[-200:]
    protect = playbook.protect.model_dump()
    blast = playbook.blast_radius.model_dump(exclude_none=True)
    return Rules(
        protect=ProtectSaid(source=source, **protect) if any(protect.values()) else None,
        blast=BlastSaid(source=source, **blast) if blast else None,
    )
