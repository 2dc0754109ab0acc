"""What a session costs when nothing fails: the row from its figures, and a real run."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("ftar_core.native._core")
from ftar_core.bench.overhead import MIB, row

from .runs import rows_of


def test_ratios_are_of_a_round_and_memory_is_what_is_beyond_the_gradients_kept() -> None:
    sizes = {
        "gradient_bytes": 100 * MIB,
        "retained_bytes": 100 * MIB,
        "grown_ours": 112 * MIB,
        "grown_ddp": 108 * MIB,
    }
    times = [{"ours": 0.1, "ddp": 0.2}, {"ours": 0.3, "ddp": 0.2}, {"ours": 0.2, "ddp": 0.2}, {"ours": 0.2, "ddp": 0.1}]
    found = row("example", 10, sizes, times)
    assert (found["rounds"], found["ours_ms"], found["ddp_ms"]) == (4, 200, 200)
    assert (found["ratio_low"], found["ratio"], found["ratio_high"]) == (0.5, 1.0, 1.5)
    assert (found["retained_x"], found["buffers_mib"], found["ddp_mib"]) == (1.0, 12.0, 108.0)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_session_keeps_one_set_of_gradients_and_little_else() -> None:
    (found,) = rows_of("overhead", "--models", "26MB", "--steps", "1", "--rounds", "2")
    assert float(found["gradient_bytes"]) > 25e6
    assert 0 < float(found["retained_x"]) <= 1
    assert float(found["buffers_mib"]) <= 64
    assert float(found["ours_ms"]) > 0
    assert float(found["ddp_ms"]) > 0
