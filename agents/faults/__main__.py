"""`python -m agents.faults`: write CATALOG.md, the page of all faults, from their published specs."""

from __future__ import annotations

from pathlib import Path

from agents.api.faultspecs import NOT_OFFERED, SPECS, TARGETS, Param, Spec

PAGE = Path(__file__).with_name("CATALOG.md")
HEAD = """# The faults

Made from `agents/api/faultspecs.py` by `python -m agents.faults`; a test holds the two together.

Every fault takes `--duration` (60 s unless given; one that cannot be taken back has none), `--reason` and `--dry-run`.
It is taken back by `ftctl revert`, when its time is up, when its agent is started anew, and by the watchdog when the
agent is dead.
`ftctl inject --list` says which of them an agent's machine cannot do, and what it lacks.
"""


def page() -> str:
    parts = [HEAD]
    for target, meaning in TARGETS.items():
        specs = [spec for spec in SPECS.values() if spec.target == target]
        parts.append(f"## On {_article(target)}\n\nAimed at {meaning}.\n")
        parts += [_entry(spec) for spec in specs]
    parts.append("## Not offered\n")
    parts += [f"* `{kind}`: {reason}" for kind, reason in NOT_OFFERED.items()]
    return "\n".join(parts).rstrip() + "\n"


def _article(target: str) -> str:
    return {"nic": "a rail", "coordinator": "the coordinator", "gpu": "GPUs"}.get(target, f"a {target}")


def _entry(spec: Spec) -> str:
    notes = []
    if spec.irreversible:
        notes.append("It cannot be taken back.")
    if spec.takes_out:
        override = "--allow-last-rail" if spec.target == "nic" else "--allow-last-replica"
        notes.append(f"Refused where too little would be left; `{override}` overrides that.")
    lines = [f"### {spec.kind}\n", f"{spec.summary}. {' '.join(notes)}".rstrip() + "\n"]
    if spec.params:
        lines += ["| option | meaning | default | limits |", "|---|---|---|---|"]
        lines += [_row(param) for param in spec.params]
        lines.append("")
    return "\n".join(lines)


def _row(param: Param) -> str:
    default = "required" if param.default is None else f"{param.default}"
    if param.choices:
        limits = ", ".join(param.choices)
    else:
        ends = (("at least", param.minimum), ("at most", param.maximum))
        limits = ", ".join(f"{word} {end:g}" for word, end in ends if end is not None)
    unit = f" ({param.unit})" if param.unit else ""
    return f"| `{param.option}` | {param.help}{unit} | {default} | {limits} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
