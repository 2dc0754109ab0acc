"""`python -m agents.policy`: write POLICIES.md, the table of what is decided, from the default policy."""

from __future__ import annotations

from pathlib import Path

from agents.policy.rules import read

PAGE = Path(__file__).with_name("POLICIES.md")


def page() -> str:
    policy = read()
    lines = ["# What is decided\n", "Made from `agents/policies/default.yaml` by `python -m agents.policy`.\n"]
    lines += ["The first rule that fits decides.\n", "| rule | kind | codes | health | suggested | times | action |"]
    lines.append("|---|---|---|---|---|---|---|")
    for r in policy.rules:
        times = f"{r.at_least} in {r.within_s:g} s" if r.at_least > 1 else "1"
        cells = [r.name, r.kind, ", ".join(r.codes), ", ".join(r.health), ", ".join(r.suggests)]
        lines.append("| " + " | ".join([*(cell or "any" for cell in cells), times, r.action]) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
