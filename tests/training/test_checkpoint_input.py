"""Checkpoints that cannot be loaded, from where a job would look for one: which is taken instead, and what is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftar_core.errors import CheckpointError, StateMismatch
from ftar_core.training.checkpoints import options, restoring, writing
from ftar_core.training.checkpoints.layout import MANIFEST, SCHEMA, complete_name
from ftar_core.training.state import state_digest

from .test_checkpoint_files import NAMES, parts_of, write


class Notes:
    """A journal that is a list."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def write(self, kind: str, line: dict[str, Any]) -> None:
        self.lines.append((kind, line))


def restore(directory: Path, parts: dict[str, Any], **given: Any) -> tuple[int | None, Notes]:
    notes = Notes()
    made = options.Checkpoint(directory, **given)
    restorer = restoring.Restorer(made, parts=parts, names=NAMES, journal=notes)  # type: ignore[arg-type]
    return restorer.run(lambda ballot: (ballot,)), notes


def cut(path: Path, name: str = "__0_0.distcp", to: int = 100) -> None:
    with (path / name).open("r+b") as file:
        file.truncate(to)


def test_one_that_was_cut_short_is_passed_by_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (100, 200, 300):
        write(tmp_path, step, parts_of(steps=step // 100))
    cut(tmp_path / complete_name(300))
    cut(tmp_path / complete_name(200), MANIFEST)
    fresh = parts_of()
    with caplog.at_level(logging.WARNING):
        step, notes = restore(tmp_path, fresh)
    assert step == 100
    assert state_digest(fresh["optimizer"]) == state_digest(parts_of(steps=1)["optimizer"])
    assert "checkpoint step-000000300 is passed by: __0_0.distcp has 100 bytes of" in caplog.text
    assert "checkpoint step-000000200 is passed by: ftar.json: " in caplog.text
    assert [line["step"] for kind, line in notes.lines if kind == "checkpoint-damaged"] == [300, 200]
    cut(tmp_path / complete_name(100))
    with pytest.raises(
        CheckpointError, match=r"none of the checkpoints in .* can be loaded; the oldest is step-0+100: "
    ) as e:
        restore(tmp_path, parts_of())
    assert e.value.hint == "move them away, and the job begins anew"


def test_a_newer_version_is_refused_however_new_it_is_and_an_older_one_is_no_substitute(tmp_path: Path) -> None:
    write(tmp_path, 100, parts_of())
    path = write(tmp_path, 200, parts_of())
    made = msgspec.json.decode((path / MANIFEST).read_bytes())
    newer = {**made, "schema": SCHEMA + 1, "ftar_core": "3.1", "colour": "blue"}
    (path / MANIFEST).write_bytes(msgspec.json.encode(newer))
    with pytest.raises(CheckpointError, match=r"step-000000200 was made by ftar_core 3\.1 \(schema 3\), this one") as e:
        restore(tmp_path, parts_of())
    assert e.value.hint is not None
    assert e.value.hint.startswith("install ftar_core 3.1 or newer, or move that checkpoint away")
    (path / MANIFEST).write_bytes(msgspec.json.encode({**newer, "history": 0}))
    assert restore(tmp_path, parts_of())[0] == 100, "of a history that was given up: nobody wants it"
    before = (path / MANIFEST).read_bytes()
    for step in (300, 400, 500):
        write(tmp_path, step, parts_of())
    writing.tidy(tmp_path, keep=1)
    assert (path / MANIFEST).read_bytes() == before, "not ours to remove"
    assert write(tmp_path, 200, parts_of()) == path
    assert (path / MANIFEST).read_bytes() == before, "nor to replace"


def test_one_of_another_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    write(tmp_path, 100, parts_of(steps=1))
    with pytest.raises(StateMismatch, match=r"tensor model\.0\..* here, .* in the checkpoint .*step-000000100") as e:
        restore(tmp_path, parts_of(width=17))
    assert e.value.hint is not None
    assert "give this model a checkpoint directory of its own" in e.value.hint


def test_a_job_that_is_to_begin_anew_goes_on_with_nothing(tmp_path: Path) -> None:
    write(tmp_path, 100, parts_of(steps=1))
    with pytest.raises(CheckpointError, match=r"holds checkpoints up to step 100, and the job is to begin anew"):
        restore(tmp_path, parts_of(), restore=False)
    assert restore(tmp_path / "empty", parts_of(), restore=False)[0] == 0
