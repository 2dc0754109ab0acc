"""What a playbook asks of every fault of its run beside the fault itself: the agents hold to it."""

from __future__ import annotations

from dataclasses import dataclass

from agents.api.safety import ProtectSaid
from ftctl.playbook.schema import Playbook


@dataclass(frozen=True)
class Rules:
    """None of what a playbook does not say is sent, so that an older agent takes the request."""

    protect: ProtectSaid | None = None


def rules_of(playbook: Playbook, file: str) -> Rules:
    """`file`: what a refusal names."""
    said = playbook.protect.model_dump()
    return Rules(protect=ProtectSaid(source=file[-200:], **said) if any(said.values()) else None)
