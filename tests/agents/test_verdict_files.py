"""Files of other monitors: said, changed, taken back, and those that cannot be used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agents.health.desk import HealthDesk
from agents.health.foreign import Foreigners
from agents.monitors.foreign import MAX_BYTES, VerdictFiles


class Node:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.desk = HealthDesk("node1", lambda *_event, **_more: None)
        self.files = VerdictFiles([path], self.desk, Foreigners(self.desk))

    def write(self, data: Any, name: str = "gpud") -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(data if isinstance(data, str) else json.dumps({"source": name, "verdicts": data}))
        os.replace(fresh, self.path)
        self.look()

    def look(self) -> None:
        for file in self.files._files:
            file.look()

    def said(self) -> dict[str, str]:
        return {verdict.object: verdict.source for verdict in self.desk.verdicts()}

    def note(self) -> tuple[bool, str]:
        (monitor,) = self.desk.answer().monitors
        return monitor.ok, monitor.note


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "verdicts.json")


def bad(gpu: int) -> dict[str, Any]:
    return {"kind": "gpu", "object": f"gpu {gpu}", "health": "unhealthy", "reason": "row remap failed"}


def test_what_a_file_says_counts_until_it_does_not_say_it(node: Node) -> None:
    node.look()
    assert node.note() == (True, "there is no such file")
    node.write([bad(1), bad(2)])
    assert node.said() == {"gpu 1": "gpud", "gpu 2": "gpud"}
    incident = node.desk.verdicts()[0].incident
    node.look()  # as it was
    assert node.desk.verdicts()[0].incident == incident
    node.write([bad(2)])
    assert node.said() == {"gpu 2": "gpud"}
    node.write([bad(3)], "dcgm")  # another monitor writes it now
    assert node.said() == {"gpu 3": "dcgm"}
    node.path.unlink()
    node.look()
    assert node.said() == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Invalid JSON"),
        ('{"source": "gpud"}', "verdicts: Field required"),
        ('{"source": "gpud", "verdicts": [], "more": 1}', "more: "),
        ('{"source": "ft-agent", "verdicts": []}', "own name"),
        ('{"source": "gpud", "verdicts": [{"kind": "gpu", "object": "gpu 1", "health": "sad"}]}', "verdicts.0.health"),
        (" " * (MAX_BYTES + 1), "more than"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_and_changes_nothing(node: Node, text: str, says: str) -> None:
    node.write([bad(1)])
    node.write(text)
    ok, note = node.note()
    assert (ok, says in note) == (False, True), note
    assert node.said() == {"gpu 1": "gpud"}
    node.write([])
    assert (node.note(), node.said()) == ((True, ""), {})


def test_a_pipe_hangs_nobody(node: Node) -> None:
    os.mkfifo(node.path)
    node.look()
    assert node.note() == (False, "not a plain file")
