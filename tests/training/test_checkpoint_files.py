"""What is on a disk: written by one, read by another, and whatever can be wrong with it. No processes."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from ftar_core.errors import CheckpointError, SettingsError, StateMismatch
from ftar_core.training.checkpoints import histories, locks, options, reading, turns, votes, writing
from ftar_core.training.checkpoints.layout import (
    MANIFEST,
    SCHEMA,
    Found,
    Manifest,
    complete_name,
    look,
    mark_damaged,
    steps_in,
    survey,
)
from ftar_core.training.state import EncodedState, look_at_state, state_digest

NAMES = {"optimizer": ("0.weight", "0.bias", "2.weight", "2.bias")}


def parts_of(width: int = 16, steps: int = 0) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60])
    for _ in range(steps):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def begin_write(directory: Path, step: int, parts: dict[str, Any], history: int = 1) -> Iterator[Path]:
    """Two steps: all is written, then it gets its name."""
    directory.mkdir(exist_ok=True)
    live = look_at_state(parts, places=True)
    copy = EncodedState(live.skeleton, live.infos, tuple(t.clone() for t in live.tensors), live.places)
    target = writing.Target(directory, step, "r0", 1, 0, 1)
    with writing.begun(target) as lock:
        writing.write_part(target, writing.state_of(copy, NAMES))
        writing.join(target)
        yield target.path
        writing.publish(target, lock, lambda files: manifest(step, files, history))
    yield target.complete


def write(directory: Path, step: int, parts: dict[str, Any], history: int = 1) -> Path:
    return list(begin_write(directory, step, parts, history))[-1]


def manifest(step: int, files: dict[str, Any], history: int = 1) -> Manifest:
    return Manifest(
        ftar_core="0.1.0",
        torch=str(torch.__version__),
        job="j",
        step=step,
        term=1,
        epoch=2,
        contributors=("r0", "r1"),
        replica="r0",
        ranks=1,
        written=0.0,
        seconds=0.0,
        data={},
        rng="",
        files=files,
        history=history,
    )


def load(found: Found, parts: dict[str, Any]) -> None:
    assert found.manifest is not None, found.problem
    reading.load(found.path, found.manifest, parts, NAMES).into(parts)


def test_what_is_written_comes_back_bit_for_bit_in_a_process_that_has_made_no_step(tmp_path: Path) -> None:
    before, after = parts_of(steps=3), parts_of()
    write(tmp_path, 400, before)
    load(look(tmp_path, 400), after)
    assert all(state_digest(before[name]) == state_digest(after[name]) for name in before)


PLAIN = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
of_model, of_optimizer = get_state_dict(model, optimizer)
state = {"model": of_model, "optimizer": of_optimizer}
dcp.load(state, checkpoint_id=sys.argv[1])
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
assert "ftar_core" not in sys.modules
torch.save([model.state_dict(), optimizer.state_dict()], sys.argv[2])
"""


def test_a_script_of_plain_torch_reads_it(tmp_path: Path) -> None:
    """The recipe of torch's own documentation."""
    parts = parts_of(steps=3)
    path = write(tmp_path, 400, parts)
    subprocess.run([sys.executable, "-c", PLAIN, str(path), str(tmp_path / "out.pt")], check=True, cwd=tmp_path)
    model, optimizer = torch.load(tmp_path / "out.pt", weights_only=False)
    for name, tensor in parts["model"].state_dict().items():
        assert torch.equal(model[name], tensor)
    assert optimizer["param_groups"][0]["lr"] == 0.01
    for number, entry in parts["optimizer"].state_dict()["state"].items():
        assert all(torch.equal(optimizer["state"][number][key], value) for key, value in entry.items())


def test_a_file_that_was_cut_short_is_seen_without_reading_it(tmp_path: Path) -> None:
    path = write(tmp_path, 400, parts_of(steps=1))
    with (path / "__0_0.distcp").open("r+b") as file:
        file.truncate(1000)
    found = look(tmp_path, 400)
    assert found.manifest is None
    assert "__0_0.distcp has 1000 bytes of " in found.problem
    assert "cut short" in found.problem


def test_a_bit_that_was_flipped_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, 400, parts_of(steps=1))
    for name in ("__0_0.distcp", ".metadata", "ftar.state"):
        original = (path / name).read_bytes()
        flipped = bytearray(original)
        flipped[len(flipped) // 2] ^= 4
        (path / name).write_bytes(flipped)
        parts = parts_of()
        before = {part: state_digest(parts[part]) for part in parts}
        with pytest.raises(reading.Damaged, match=rf"{name} has the SHA-256"):
            load(look(tmp_path, 400), parts)
        assert before == {part: state_digest(parts[part]) for part in parts}
        (path / name).write_bytes(original)


def test_one_that_was_found_damaged_is_passed_by_from_then_on(tmp_path: Path) -> None:
    path = write(tmp_path, 400, parts_of())
    mark_damaged(path, "x has another digest")
    assert look(tmp_path, 400).problem == "x has another digest"


def test_another_model_is_refused_with_its_first_difference(tmp_path: Path) -> None:
    write(tmp_path, 400, parts_of(steps=1))
    other = parts_of(width=17)
    before = state_digest(other["model"])
    with pytest.raises(StateMismatch, match=r"tensor model\.0\.\w+: torch.float32 \(17.*here, torch.float32 \(16"):
        load(look(tmp_path, 400), other)
    assert state_digest(other["model"]) == before
    other["model"] = nn.Sequential(nn.Linear(8, 16))
    with pytest.raises(StateMismatch, match=r"tensor model.2.bias: in the checkpoint .* but not in this model"):
        load(look(tmp_path, 400), other)


def test_one_of_a_newer_version_is_refused_and_says_which(tmp_path: Path) -> None:
    path = write(tmp_path, 400, parts_of())
    made = msgspec.json.decode((path / MANIFEST).read_bytes())
    (path / MANIFEST).write_bytes(
        msgspec.json.encode({**made, "schema": SCHEMA + 1, "ftar_core": "3.1", "colour": "blue"})
    )
    with pytest.raises(CheckpointError, match=r"was made by ftar_core 3\.1 \(schema 3\)"):
        look(tmp_path, 400)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"schema": 1}', b"\xff\xfe", b'{"schema": "x"}'])
def test_a_manifest_that_is_none_is_no_reason_to_stop(tmp_path: Path, text: bytes) -> None:
    path = write(tmp_path, 400, parts_of())
    (path / MANIFEST).write_bytes(text)
    assert look(tmp_path, 400).problem.startswith(MANIFEST)


def test_the_metadata_cannot_run_anything(tmp_path: Path) -> None:
    import os
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    from ftar_core.training.checkpoints.metadata import read_metadata

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="does not belong there"):
        read_metadata(tmp_path / ".metadata")
    assert not (tmp_path / "ran").exists()


def test_the_newest_are_kept_and_what_dead_writers_left_is_removed(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        write(tmp_path, step, parts_of())
    dead = writing.Target(tmp_path, 350, "r1", 9, 0, 1)
    dead.path.mkdir()
    (dead.path / writing.LOCK).touch()
    alive = writing.Target(tmp_path, 500, "r2", 9, 0, 1)
    with writing.begun(alive):
        writing.tidy(tmp_path, keep=2)
        assert steps_in(tmp_path) == [300, 400]
        assert not dead.path.exists()
        assert alive.path.exists()
        (tmp_path / "notes.txt").touch()
        alive.complete.mkdir()  # somebody else was quicker
    writing.tidy(tmp_path, keep=2)


def newest(directory: Path) -> tuple[int, int]:
    return (survey(directory)[-1].history, survey(directory)[-1].step)


def test_a_job_that_began_again_from_an_older_one_goes_by_its_own_history(tmp_path: Path) -> None:
    """Steps up to 50 are kept, 40 and 50 cannot be loaded on the day all die, and a writer of 60 is frozen."""
    parts = parts_of()
    for step in (30, 40, 50):
        write(tmp_path, step, parts)
    frozen = begin_write(tmp_path, 60, parts)
    next(frozen)
    for step in (40, 50):
        mark_damaged(tmp_path / complete_name(step), "x has another digest")
    assert histories.following(tmp_path, survey(tmp_path)) == 2
    histories.begin(tmp_path, 2)
    histories.begin(tmp_path, 2)
    assert histories.running(tmp_path) == 2
    write(tmp_path, 35, parts, history=2)
    assert newest(tmp_path) == (2, 35)
    write(tmp_path, 40, parts, history=2)  # that of the same step is in the way
    assert newest(tmp_path) == (2, 40)
    assert look(tmp_path, 40).loadable
    next(frozen)
    assert look(tmp_path, 60).loadable, "it thaws and finishes what it had begun"
    assert newest(tmp_path) == (2, 40)
    writing.tidy(tmp_path, keep=2)
    assert [found.step for found in survey(tmp_path)] == [35, 40], "what is kept is the newest of what counts"
    late = begin_write(tmp_path, 40, parts)
    next(late)
    next(late)
    assert look(tmp_path, 40).history == 2, "an older history takes nobody's place"
    assert not list(tmp_path.glob(".step-*"))
    (tmp_path / histories.FILE).unlink()
    assert histories.following(tmp_path, survey(tmp_path)) == 3, "manifests say it, too"


@pytest.mark.parametrize("text", [b"", b"x", b"-3", b"9" * 40])
def test_a_history_that_cannot_be_read_is_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / histories.FILE).write_bytes(text)
    assert histories.running(tmp_path) == 0
    assert histories.following(tmp_path, survey(tmp_path)) >= 1


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write(tmp_path, step, parts_of())
    mark_damaged(tmp_path / complete_name(40), "x")
    writing.tidy(tmp_path, keep=2)
    assert steps_in(tmp_path) == [20, 30, 40]
    write(tmp_path, 50, parts_of())
    write(tmp_path, 60, parts_of())
    writing.tidy(tmp_path, keep=2)
    assert steps_in(tmp_path) == [50, 60]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    target = writing.Target(tmp_path, 100, "r0", 1, 0, 1)
    with pytest.raises(OSError, match="No space"), writing.begun(target):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert steps_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


HOLD = """
import sys, time
from pathlib import Path
from ftar_core.training.checkpoints import locks
lock = locks.hold(Path(sys.argv[1]), sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_directory_belongs_to_one_job_as_long_as_one_of_its_processes_lives(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), "job a"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(CheckpointError, match="is in use by job a"):
            locks.hold(tmp_path, "job b")
        mate = locks.hold(tmp_path, "job a")
        assert mate is not None
        mate.close()
    finally:
        other.kill()
        other.communicate()
    mine = locks.hold(tmp_path, "job b")
    assert mine is not None
    mine.close()


def test_whose_turn_it_is_follows_from_the_commit_alone() -> None:
    lives = {"r0": 1, "r1": 2, "r2": 3}
    names = ("r0", "r1", "r2")
    firsts = [turns.order_of(step, 100, names, lives).lives[0][0] for step in (100, 200, 300, 400)]
    assert firsts == ["r1", "r2", "r0", "r1"], "another one each time"
    order = turns.order_of(100, 100, names, lives)

    def writers(here: dict[str, int], idle_s: float = 0.0) -> list[str]:
        return [name for name in names if turns.is_mine(order, (name, lives[name]), here, idle_s, 60.0)]

    assert writers(lives) == ["r1"]
    assert writers({"r0": 1, "r2": 3}) == ["r1", "r2"], "r1 itself does not know yet that it is out"
    assert "r2" in writers({"r0": 1, "r1": 7, "r2": 3}), "who came back has no snapshot"
    assert writers(lives, idle_s=61.0) == ["r1", "r2"], "nothing was written for too long"
    left = turns.order_of(100, 100, names, {"r0": 1, "r2": 3})
    assert left.lives == (("r2", 3), ("r0", 1)), "r1 left with that very commit"


A, B, C, D = ("r0", 1), ("r1", 2), ("r2", 3), ("r3", 4)


@pytest.mark.parametrize(
    ("told", "odd", "clear"),
    [
        ({A: ["x"], B: ["x"], C: ["x"]}, set(), True),
        ({A: ["x"]}, set(), True),
        ({}, set(), True),
        ({A: ["x"], B: ["y"], C: ["x"]}, {B}, True),
        ({A: ["x"], B: ["y"]}, {A, B}, False),
        ({A: ["x"], B: ["y"], C: ["z"]}, {A, B, C}, False),
        ({A: ["x"], B: ["y"], C: ["x"], D: ["y"]}, {A, B, C, D}, False),
        ({A: ["x"], B: [""], C: ["x"]}, set(), True),
        ({A: ["x"], B: [""], C: ["y"]}, {A, C}, False),
        ({A: ["x", "p"], B: ["x", "q"], C: ["x", "p"]}, {B}, True),  # each ring votes for itself
        ({A: ["x", "p"], B: ["y", "p"], C: ["x", "q"]}, {B, C}, True),
    ],
)
def test_most_are_right_about_a_snapshot_and_two_can_only_differ(
    told: dict[turns.Life, list[str]], odd: set[turns.Life], clear: bool
) -> None:
    assert votes.judge(told) == votes.Verdict(frozenset(odd), clear)


def test_whoever_steps_out_is_followed_by_the_next(tmp_path: Path) -> None:
    box = votes.Box(tmp_path, 100, 2)
    order, here = turns.Order(100, (A, B, C)), dict([A, B, C])
    mine = {life: turns.is_mine(order, life, here, 0.0, 60.0, out=box.is_out) for life in (A, B, C)}
    assert mine == {A: True, B: False, C: False}
    for rank in (1, 0):
        assert box.of(B, 2) is None
        box.cast(B, rank, "f" * 32)
    assert box.of(B, 2) == ["f" * 32] * 2
    box.step_out(A)
    assert turns.is_mine(order, B, here, 0.0, 60.0, out=box.is_out)
    assert not turns.is_mine(order, C, here, 0.0, 60.0, out=box.is_out)
    assert not votes.Box(tmp_path, 100, 1).is_out(A), "what was said in another history is nothing here"
    votes.Box(tmp_path, 110, 2).give_up()
    votes.forget(tmp_path, [path.name for path in tmp_path.iterdir()], 2, 105)
    assert [path.name for path in tmp_path.iterdir()] == [".step-000000110.2.votes"]


@pytest.mark.parametrize("every", [0, -1, True, "", "10", "10 parsecs", "0s", 1.5, None])
def test_an_interval_that_is_none_is_refused(every: Any) -> None:
    with pytest.raises(SettingsError, match="every"):
        options.Checkpoint("/tmp/x", every=every)


def test_intervals_are_steps_or_times() -> None:
    assert options.Checkpoint("/tmp/x", every=7).steps == 7
    assert options.Checkpoint("/tmp/x", every="10min").seconds == 600
    assert options.Checkpoint("/tmp/x", every="90 s").seconds == 90
    for wrong in ({"keep": 0}, {"keep": True}, {"takeover_s": 0.0}):
        with pytest.raises(SettingsError):
            options.Checkpoint("/tmp/x", **wrong)  # type: ignore[arg-type]
    with pytest.raises(SettingsError):
        options.Checkpoint("")
    assert complete_name(400) == "step-000000400"
