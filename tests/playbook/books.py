"""Playbooks and journals for tests, written by hand."""

from __future__ import annotations

from pathlib import Path

from ftctl.playbook.reading import Loaded, load

MINIMAL = """\
version: 1
name: a
steady_state:
  - {expect: replicas.contributing == 3}
method:
  - {steps: 1}
"""


def written(folder: Path, text: str, name: str = "a.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def book(folder: Path, text: str, **variables: str) -> Loaded:
    return load(written(folder, text), variables)


def with_method(*lines: str, **more: str) -> str:
    extra = "".join(f"{key}: {value}\n" for key, value in more.items())
    return MINIMAL.split("method:", maxsplit=1)[0] + extra + "method:\n" + "".join(f"  - {line}\n" for line in lines)
