"""What a session costs when nothing fails: the row from its figures, and a real run."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("ftar_core.native._core")
import torch

from ftar_core.bench.overhead import MIB, row
from ftar_core.bench.overhead_worker import private_bytes

from .runs import rows_of


def test_ratios_are_of_a_round_and_memory_is_what_is_beyond_the_gradients_kept() -> None:
    sizes = {
        "gradient_bytes": 100 * MIB,
        "retained_bytes": 100 * MIB,
        "grown_ours": 112 * MIB,
        "grown_ddp": 108 * MIB,
    }
    wall = [(0.1, 0.2), (0.3, 0.2), (0.2, 0.2), (0.2, 0.1)]
    times = [{"ours": ours, "ddp": ddp, "ours_cpu": 0.3, "ddp_cpu": 0.2} for ours, ddp in wall]
    found = row("example", 10, sizes, times)
    assert (found["rounds"], found["ours_ms"], found["ddp_ms"]) == (4, 200, 200)
    assert (found["ratio_low"], found["ratio"], found["ratio_high"]) == (0.5, 1.0, 1.5)
    assert found["cpu_ratio"] == 1.5
    assert (found["retained_x"], found["buffers_mib"], found["ddp_mib"]) == (1.0, 12.0, 108.0)


def test_memory_that_was_given_back_is_nobodys_buffer() -> None:
    before = private_bytes()
    held = [torch.zeros(100 * 1024, dtype=torch.uint8) for _ in range(640)]  # too small for mappings of their own
    above = held.pop()
    assert private_bytes() - before > 60 * MIB
    del held[:]
    assert private_bytes() - before < 8 * MIB, "the allocator keeps it, below a tensor that is still there"
    del above


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_session_keeps_one_set_of_gradients_and_little_else() -> None:
    (found,) = rows_of("overhead", "--models", "26MB", "--steps", "1", "--rounds", "2")
    assert float(found["gradient_bytes"]) > 25e6
    assert 0 < float(found["retained_x"]) <= 1
    assert abs(float(found["buffers_mib"])) <= 16, "results take the place of what plain training has in `.grad`"
    assert 20 <= float(found["ddp_mib"]) <= 40, "its buckets, beside the gradients"
    assert float(found["ours_ms"]) > 0
    assert float(found["ddp_ms"]) > 0
