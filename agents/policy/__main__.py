"""`python -m agents.policy`: write POLICIES.md, the table of what is decided, from the default policy."""

from __future__ import annotations

from pathlib import Path

from agents.api.policyfile import read

PAGE = Path(__file__).with_name("POLICIES.md")


def page() -> str:
    policy = read()
    lines = ["# What is decided\n", "Made from `agents/policies/default.yaml` by `python -m agents.policy`.\n"]
    words = {
        "cooldown_s": "seconds between two acts on the same object; a stronger act need not wait",
        "max_acts": "acts on the same object within window_s, then the breaker opens: no act, and no rejoin",
        "window_s": "seconds",
        "max_share": "of the replicas that may be out at once",
        "rejoin_after_s": "seconds for which the object has been well when its replica comes back",
    }
    lines += ["| limit | value | meaning |", "|---|---|---|"]
    lines += [f"| {name} | {getattr(policy.limits, name):g} | {text} |" for name, text in words.items()]
    lines += ["\nThe first rule that fits decides.\n", "| rule | kind | codes | health | suggested | times | action |"]
    lines.append("|---|---|---|---|---|---|---|")
    for r in policy.rules:
        times = f"{r.at_least} in {r.within_s:g} s" if r.at_least > 1 else "1"
        did = r.action + (" and cordon" if r.cordon else "") + (f", run {r.hook[0]}" if r.hook else "")
        cells = [r.name, r.kind, ", ".join(r.codes), ", ".join(r.health), ", ".join(r.suggests)]
        lines.append("| " + " | ".join([*(cell or "any" for cell in cells), times, did]) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
