"""Packet rules in tables of our own, through the `nft` program (nft(8), package nftables).

A fault's rules live in one table of the netdev family with a name that nobody else has, made in one transaction and
removed with one command; tables of others are neither read nor touched. The program, not netlink: its netlink messages
for rules are a compiler's output and bound to its version, and whoever takes a fault back by hand uses it too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from typing import Any, Protocol

from agents.host.errors import HostError

TIMEOUT_S = 5.0
FAMILY = "netdev"
# Checked by the kernel and not committed: hooks for both directions, and the generator of random numbers.
PROBE = """table netdev ftctl_probe {
 chain in { type filter hook ingress device "lo" priority 0; numgen random mod 10 < 1 drop; }
 chain out { type filter hook egress device "lo" priority 0; numgen random mod 10 < 1 drop; }
}
"""


class Nft(Protocol):
    """All raise HostError."""

    def unsupported(self) -> str:
        """Why rules at network devices cannot be made here; empty if they can."""
        ...

    def load(self, ruleset: str, operation: str) -> None:
        """Commands in nft's language, all or nothing."""
        ...

    def packets(self, table: str) -> int | None:
        """How many packets the counters of a table of ours have seen; None if there is no such table."""
        ...

    def delete(self, table: str) -> bool:
        """False if there is none."""
        ...


@dataclass
class NftProgram:
    _works: bool = field(default=False, init=False)

    def unsupported(self) -> str:
        if self._works and _program() is not None:
            return ""
        try:
            self._run(["-c", "-f", "-"], "probe packet rules", PROBE)
        except HostError as error:
            return f"packet rules at network devices cannot be made: {error.text}"
        self._works = True
        return ""

    def load(self, ruleset: str, operation: str) -> None:
        self._run(["-f", "-"], operation, ruleset)

    def packets(self, table: str) -> int | None:
        tables = _json(self._run(["-j", "list", "tables", FAMILY], "list packet rules"))
        if not any(entry.get("table", {}).get("name") == table for entry in tables):
            return None
        rules = _json(self._run(["-j", "list", "table", FAMILY, table], "list packet rules"))
        return sum(
            int(expression["counter"]["packets"])
            for entry in rules
            for expression in entry.get("rule", {}).get("expr", ())
            if isinstance(expression.get("counter"), dict)
        )

    def delete(self, table: str) -> bool:
        if self.packets(table) is None:
            return False
        self._run(["delete", "table", FAMILY, table], f"remove the packet rules of table {table}")
        return True

    def _run(self, arguments: list[str], operation: str, text: str = "") -> str:
        program = _program()
        if program is None:
            raise HostError(operation, 0, "the program nft is missing: install the package nftables")
        try:
            done = subprocess.run(
                [program, *arguments], input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except OSError as error:
            raise HostError.of(operation, error) from None
        except subprocess.TimeoutExpired:
            raise HostError(operation, 0, f"nft did not answer within {TIMEOUT_S:g} s") from None
        if done.returncode != 0:
            words = done.stderr.strip().splitlines()
            raise HostError(operation, 0, words[0] if words else f"nft ended with {done.returncode}")
        return done.stdout


def _program() -> str | None:
    """Looked for each time: it can be installed, and removed, while an agent runs."""
    return shutil.which("nft", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _json(text: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads(text)["nftables"]
    except (ValueError, KeyError, TypeError) as error:
        raise HostError("list packet rules", 0, f"nft's answer is not understood: {error}") from None
    return found
