"""Texts of other people on a terminal. Imports nothing that is slow: every command line does."""

from __future__ import annotations

import re

# Control characters (ECMA-48: C0 but for tab and line feed, DEL, C1), and those that turn the direction of writing
# (Unicode TR9), with which one name can be made to look like another.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """As it is, with a blank for each character that would change what the terminal shows elsewhere."""
    return _CONTROLS.sub(" ", text)
