"""What a checkpoint costs the steps beside it: the row from the times of rounds, and a real run."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("ftar_core.native._core")
from ftar_core.bench.checkpoint import main, row, worst

from .runs import rows_of

ON, OFF = [0.1, 0.13, 0.1], [0.1, 0.1, 0.1]


def a_round(times: list[float], *, on: bool, cpu: float = 0.3) -> dict[str, object]:
    return {"on": on, "times": times, "cpu": cpu, "written": on, "late": False}


def test_steps_are_compared_by_their_place_in_the_round() -> None:
    lines = [{"state_bytes": 12_000_000}]
    lines += [a_round(ON, on=True, cpu=0.35), a_round(OFF, on=False)] * 5  # type: ignore[list-item]
    lines += [a_round([0.1, 0.9, 0.1], on=True), a_round([0.1, 0.1, 0.4], on=False)]  # type: ignore[list-item]
    found = row("example", 200, lines)
    assert (found["worst"], found["worst_at"]) == (1.3, 1), "one slow step is no cost"
    assert (found["rounds"], found["written"], found["step_ms"]) == (6, 6, 100.0)
    assert found["mean"] == pytest.approx(1.1)
    assert (found["noise"], found["longest_ms"], found["longest_without_ms"]) == (1.0, 900.0, 400.0)
    assert found["cpu_ms"] == pytest.approx(41.7)
    assert worst([[1.0, 1.0]], [[2.0, 1.0]]) == (1.0, 1)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--paces", "200,x"), "--paces: '200,x': milliseconds"),
        (("--paces", "10001"), "milliseconds up to 10000"),
        (("--steps", "2"), "--steps: at least 3"),
        (("--rounds", "0"), "--rounds: from 1"),
        (("--directory", "/nowhere"), "--directory: /nowhere is no directory"),
        (("--models", "llama"), "there is no 'llama'"),
    ],
)
def test_wrong_input_is_named(args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_other_round_has_a_checkpoint() -> None:
    (found,) = rows_of("checkpoint", "--paces", "50", "--steps", "8", "--rounds", "2")
    assert (found["rounds"], found["pace_ms"]) == (2, 50)
    assert float(found["state_bytes"]) > 12e6
    assert float(found["written"]) + float(found["late"]) >= 1
    assert float(found["step_ms"]) >= 50
