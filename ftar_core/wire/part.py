"""Bases of messages and of what they are made of."""

from __future__ import annotations

import msgspec


class Part(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A struct that travels inside of a message."""


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base of everything that travels on a control connection."""
