"""`python -m ftctl.playbook`: write playbooks/REFERENCE.md, all that a playbook may say, from the schema itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ftctl.durations import show
from ftctl.playbook import facts, objectives, schema

PAGE = Path(__file__).parents[2] / "playbooks" / "REFERENCE.md"
HEAD = """# What a playbook may say

Made from `ftctl/playbook/schema.py` by `python -m ftctl.playbook`; a test holds the two together.

`ftctl chaos init FILE` writes a playbook to begin with, `ftctl chaos schema` prints all of this as JSON Schema for an
editor, `ftctl chaos validate` names every mistake with its line. Durations are texts: `500ms`, `20s`, `1h30m`. `$name`
is a variable of `vars`.
"""


def page() -> str:
    parts = [HEAD, "## The file\n", *_fields(schema.Playbook)]
    parts += [
        "",
        "## Actions\n",
        "Of `method` and `cleanup`; probes (`expect`, `command`, `http`) of `steady_state`, too.\n",
    ]
    parts += ["| action | does | other keys |", "|---|---|---|"]
    for verb, kind in schema.VERBS.items():
        others = [_key(name, field) for name, field in kind.model_fields.items() if (field.alias or name) != verb]
        parts.append(f"| `{verb}` | {_said(kind)} | {', '.join(others)} |")
    for title, kind in (("Where: `target`", schema.Target), ("When: `at`", schema.At), ("`storm`", schema.StormPlan)):
        parts += ["", f"## {title}\n", f"{_said(kind)}\n", *_fields(kind)]
    parts += ["", "## Conditions\n"]
    parts += [
        "Facts, numbers and words with `==`, `!=`, `<`, `<=`, `>`, `>=`, joined by `and`, or by `or`, not both."
        "\nWhat is not known is not met.\n"
    ]
    parts += ["| fact | is |", "|---|---|"]
    parts += [f"| `{fact}` | {meaning} |" for fact, meaning in facts.CATALOG.items()]
    parts += [
        "",
        "## Objectives\n",
        "`max`, `p50`, `p95`, `p99` over all incidents of all rounds; `effective_time` has `min`.\n",
    ]
    parts += ["| objective | is |", "|---|---|"]
    parts += [f"| `{name}` | {field.description} |" for name, field in objectives.Objectives.model_fields.items()]
    parts += ["", "## `lab`\n", f"{_said(schema.Lab)}\n", *_fields(schema.Lab)]
    return "\n".join(parts).rstrip() + "\n"


def _said(kind: type[BaseModel]) -> str:
    """Its docstring in one line; where it has none, nothing is to be said."""
    return " ".join((kind.__dict__.get("__doc__") or "").split()).replace("|", "\\|")


def _fields(kind: type[BaseModel]) -> list[str]:
    return ["* " + ", ".join(_key(name, field) for name, field in kind.model_fields.items())]


def _key(name: str, field: FieldInfo) -> str:
    """The key with its default."""
    default: Any = field.default
    key = field.alias or name
    if default is PydanticUndefined or default is None or default == "" or isinstance(default, (BaseModel, list, dict)):
        return f"`{key}`"
    if isinstance(default, bool):
        return f"`{key}: {str(default).lower()}`"
    return f"`{key}: {show(default)}`" if isinstance(default, float) else f"`{key}: {default}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
