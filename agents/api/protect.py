"""What no fault may touch: nodes, network devices and replicas, named by patterns. Pure; standard library only.

The same rules stand in the agent's settings, in the helper's (root's own) and in a playbook. They are held to where the
fault would be made, so a request with no playbook behind it meets them too, and nothing overrides them: who wants the
fault changes the file.

A pattern is a name with * ? [...] (fnmatch(3), the case counts). A device is protected on every node (`eth0`, `ib*`) or
on some (`head*/eth1`). On a protected node there is no fault at all; on a node with processes of a protected replica
there is none but of other replicas' processes, since everything else there would hit it as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

MAX_RULES = 256  # of a kind
MAX_PATTERN = 128


@dataclass(frozen=True)
class Protection:
    """`source`: where the rules stand, as people call it: a file."""

    nodes: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    source: str = ""

    def __bool__(self) -> bool:
        return bool(self.nodes or self.nics or self.replicas)

    def node(self, node: str) -> str:
        """The rule that protects it; empty: none does."""
        return self._rule("nodes", self.nodes, (node,))

    def nic(self, node: str, nic: str) -> str:
        return self._rule("nics", self.nics, (nic, f"{node}/{nic}"))

    def replica(self, replica: str) -> str:
        return self._rule("replicas", self.replicas, (replica,))

    def why(self, node: str, nics: tuple[str, ...], replicas: tuple[str, ...]) -> str:
        """Why a fault may not touch these; empty: it may, as far as these rules go."""
        if node and (rule := self.node(node)):
            return f"{node} is protected ({rule})"
        for nic in nics:
            if rule := self.nic(node, nic):
                return f"{'/'.join(filter(None, (node, nic)))} is protected ({rule})"
        for replica in replicas:
            if rule := self.replica(replica):
                return f"it would hit replica {replica}, which is protected ({rule})"
        return ""

    def _rule(self, kind: str, patterns: tuple[str, ...], names: tuple[str, ...]) -> str:
        found = next((p for p in patterns if any(fnmatchcase(name, p) for name in names)), None)
        return "" if found is None else f'{kind}: "{found}" in {self.source}'


def pattern_problem(kind: str, pattern: str) -> str:
    """What is wrong with a pattern; empty if nothing is."""
    if not pattern or len(pattern) > MAX_PATTERN or pattern.split() != [pattern] or not pattern.isprintable():
        return f"{pattern!r} is no pattern of a name (1 to {MAX_PATTERN} characters, no spaces)"
    if pattern.count("/") > (kind == "nics"):
        where = "NODE/DEVICE, or a device" if kind == "nics" else "a name without /"
        return f"{pattern!r}: {where} is expected"
    return ""
