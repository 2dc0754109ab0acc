"""The example that ships with the package: its data and model, and a whole run of two replicas."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ftar_core.training import example
from ftar_core.training.example_model import ByteGPT, Shape, SourceText

from . import conftest
from .conftest import Job


def test_the_default_model_has_about_a_million_parameters_and_learns_from_past_bytes_only() -> None:
    model = ByteGPT(Shape())
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 5_000_000
    small = ByteGPT(Shape(layers=1, heads=2, width=16, context=8))
    text = torch.randint(0, 256, (1, 8))
    changed = text.clone()
    changed[0, 5:] = 0
    assert torch.equal(small(text)[0, :5], small(changed)[0, :5])


def test_the_data_is_the_same_on_every_machine_with_this_python(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "site-packages").mkdir()
    for name, text in (
        ("z.py", "zz"),
        ("a.py", "aaa"),
        ("b/c.py", "cccc"),
        ("site-packages/no.py", "no"),
        ("x.txt", ""),
    ):
        (tmp_path / name).write_text(text)
    text = SourceText(4, root=tmp_path)
    assert bytes(text._text.tolist()) == b"aaazzcccc"
    assert len(text) == 2
    inputs, targets = text.windows(torch.tensor([1]))
    assert bytes(inputs[0].tolist()) == b"zccc"
    assert bytes(targets[0].tolist()) == b"cccc"
    assert len(SourceText(64)) > 10_000
    with pytest.raises(ValueError, match="no Python source"):
        SourceText(100, root=tmp_path)


def test_without_settings_one_line_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FTAR_COORDINATOR", raising=False)
    assert example.main(["--steps", "1", "--layers", "1", "--width", "16"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == "error: FTAR_COORDINATOR is not set"
    assert example.main(["--width", "10", "--heads", "4"]) == 2
    assert "--width must be a multiple of --heads" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        example.main(["--batch-size", "0"])
    assert caught.value.code == 2


def run_example(environment: dict[str, str], log: Path, arguments: Sequence[str]) -> None:
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # for the workers: not the test's fork server
    raise SystemExit(example.main(arguments))


def test_two_replicas_train_it_and_the_loss_goes_down(job: Job) -> None:
    job.coordinator(replicas=2)
    small = ["--steps", "60", "--step-ms", "0", "--layers", "1", "--heads", "2", "--width", "32"]
    small += ["--context", "16", "--print-every", "20"]
    for name in ("r0", "r1"):
        process = conftest.FORKS.Process(
            target=run_example,
            args=(job.environment(name), job.path / f"{name}.log", [*small, "--workers", name[1]]),  # 0 and 1
            name=name,
        )
        process.start()
        job.adopt(name, process)
    job.assert_finished("r0", "r1")
    job.assert_identical("r0", "r1")
    losses = [line["loss"] for line in job.lines("r0", "step")]
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])
    printed = (job.path / "r0.log").read_text()
    assert "step 60  loss" in printed
    assert "contributors r0 r1" in printed
    assert job.lines("r0", "step")[-1]["tokens"] == 2 * 2 * 16
