"""`python -m agents.policy`: write POLICIES.md, the tables of what is decided, from the default policy and the Xids."""

from __future__ import annotations

from pathlib import Path

from agents.api.policyfile import Policy, read
from agents.api.words import Action, Health
from agents.health.xidtable import NAMED
from agents.health.xidtable import read as read_xids
from agents.policy.engine import Finding, Fleet, Past, decide

PAGE = Path(__file__).with_name("POLICIES.md")
STANDING = [
    "\n## What stands when a mode is set\n",
    "`ftctl policy set-mode` decides anew about everything that is wrong at that moment, with all limits, and tells it",
    "(`policy.decided`). What follows from a condition (`drain`, `promote`, `evict`, cordon, `rejoin`) is done then,",
    "since it is as needed as before. A `restart`, and the hook of its rule, answers something that happened (Xid 31:",
    "the process that it hit has long ended, or trains on): it is not made up for, whatever the mode was then,",
    'and is told as "not done: it was decided about when it happened". Who wants it says `ftctl evict replica`.',
]


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
    lines += STANDING
    return "\n".join([*lines, *_xids(policy)]) + "\n"


def _xids(policy: Policy) -> list[str]:
    """What the policy decides about each Xid of the table, as it decides in an agent."""
    table = read_xids()
    lines = [
        "\n## What each Xid comes to\n",
        "From `agents/health/xids.yaml` (which `xid_table` in an agent's configuration changes) and the rules above,",
        "in the mode `act`. *Again*: seen on the same GPU, or unit of it, as often as the table says within its time.",
        "An Xid that the table does not know is degraded, and somebody is asked to look.\n",
        "| Xid | meaning | verdict | suggests | decision | again |",
        "|---|---|---|---|---|---|",
    ]
    for code, row in sorted(table.rows.items()):
        first = _decided(policy, code, row.health, row.action)
        again = ""
        if row.repeat is not None:
            unit = " of a unit" if row.unit else ""
            often = f"{row.repeat.times} times{unit} in {row.repeat.within_s:g} s"
            again = f"{often}: {_decided(policy, code, row.health, row.repeat.action)}"
        special = [
            f"follows Xid {row.follows}, which decides" if row.follows not in (None, NAMED) else "",
            "follows the Xid that it names, which decides" if row.follows == NAMED else "",
            f"if fatal: {_decided(policy, code, Health.UNHEALTHY, row.fatal)}" if row.fatal is not None else "",
            "if its process died, else watch" if row.if_died else "",
            "the recovery that it announces decides" if row.recovery else "",
        ]
        note = "; ".join(word for word in special if word)
        cells = [
            str(code),
            row.meaning,
            row.health.value,
            row.action.value,
            f"{first} ({note})" if note else first,
            again,
        ]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return lines


def _decided(policy: Policy, code: int, health: Health, suggests: Action) -> str:
    finding = Finding("node1/gpu 0", "gpu", health.value, f"xid.{code}", suggests.value)
    decision = decide(policy, "act", finding, Past(), Fleet(8, whom=("r0",)), now=0.0)
    rule = next(rule for rule in policy.rules if rule.name == decision.rule)
    return decision.action + (" and cordon" if rule.cordon else "")


if __name__ == "__main__":
    PAGE.write_text(page())
