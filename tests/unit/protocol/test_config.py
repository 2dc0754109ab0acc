from __future__ import annotations

import pytest

from ftar_core.protocol.config import Detection, JobConfig


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"replicas": 0}, "at least one replica"),
        ({"replicas": 2, "min_replicas": 3}, "min-replicas must be from 1 to 2"),
        ({"replicas": 2, "min_replicas": 0}, "min-replicas must be from 1 to 2"),
        ({"replicas": 2, "steps": -1}, "steps must be 0"),
        ({"replicas": 2, "detection": Detection(suspect_after_s=3.0)}, "suspect-after <= evict-after"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        JobConfig(job="j", **settings)  # type: ignore[arg-type]


def test_every_threshold_is_shown_and_the_lab_is_quicker() -> None:
    shown = JobConfig(job="j", replicas=3).lab().shown()
    assert (shown["suspect_after_s"], shown["evict_after_s"], shown["max_evictions"]) == (0.3, 0.5, 0)
    assert {"replicas", "min_replicas", "start_timeout_s", "recovery_wait_s", "hold_exit_s"} <= set(shown)
