"""The command line: every setting has an option, every mistake one line, exit code 2."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from ftar_core.coordinator.options import DETECTION_HELP, JOB_HELP, build_parser, duration_s, option_of, parse
from ftar_core.errors import SettingsError
from ftar_core.protocol.config import LAB_DETECTION, Detection, JobConfig


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    for name, text in (("token", "t" * 32), ("optoken", "o" * 32)):
        path = tmp_path / name
        path.touch(mode=0o600)
        path.write_text(text)
    files = ["--token-file", str(tmp_path / "token"), "--operator-token-file", str(tmp_path / "optoken")]
    return ["--job", "demo", "--replicas", "3", "--store", str(tmp_path / "store"), *files]


def test_no_setting_without_an_option() -> None:
    assert set(DETECTION_HELP) == {f.name for f in fields(Detection)}
    apart = {"job", "replicas", "detection", "fail_on_nonfinite", "continue_unattributed"}
    assert set(JOB_HELP) == {f.name for f in fields(JobConfig)} - apart
    text = build_parser().format_help()
    for name in (*DETECTION_HELP, *JOB_HELP):
        assert option_of(name) in text


def test_defaults_profile_and_override(base: list[str]) -> None:
    options = parse(base)
    assert options.config == JobConfig(job="demo", replicas=3)
    assert str(options.listen) == "127.0.0.1:7600"
    assert parse([*base, "--profile", "lab"]).config.detection == LAB_DETECTION
    mixed = parse([*base, "--profile", "lab", "--evict-after", "900ms", "--evict-hung", "--min-replicas", "2"]).config
    assert mixed.detection.evict_after_s == pytest.approx(0.9)
    assert mixed.detection.suspect_after_s == LAB_DETECTION.suspect_after_s
    assert mixed.detection.evict_hung
    assert mixed.min_replicas == 2
    watched = parse([*base, "--evict-diverged", "--explain", "200ms", "--on-unattributed", "continue"]).config
    assert watched.detection.evict_diverged
    assert watched.detection.explain_s == pytest.approx(0.2)
    assert watched.continue_unattributed
    assert parse([*base, "--start-timeout", "2m"]).config.start_timeout_s == 120


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--job", "Demo!"], "not a valid name"),
        (["--replicas", "0"], "at least one replica"),
        (["--replicas", "-1"], "whole number"),
        (["--replicas", "many"], "whole number"),
        (["--min-replicas", "4"], "min-replicas"),
        (["--evict-after", "soon"], "no time"),
        (["--evict-after", "100ms"], "suspect-after"),
        (["--hung-factor", "nan"], "above 0"),
        (["--listen", "here"], "HOST:PORT"),
        (["--listen", ":7600"], "host is missing"),
        (["--profile", "fast"], "invalid choice"),
        (["--new", "--record-lost"], "exclude each other"),
        (["--stepz", "3"], "unrecognized arguments: --stepz"),
        (["--port-file", "/nonexistent/port"], "no such directory"),
        (["--store"], "expected one argument"),
        (["--token-file", "/nonexistent"], "No such file"),
    ],
)
def test_each_mistake_is_one_line(base: list[str], more: list[str], reason: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse([*base, *more])
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_the_two_tokens_must_differ(base: list[str], tmp_path: Path) -> None:
    (tmp_path / "optoken").write_text("t" * 32)
    with pytest.raises(SettingsError, match="same token"):
        parse(base)


@pytest.mark.parametrize(
    ("text", "seconds"), [("2", 2), ("2s", 2), (".5 s", 0.5), ("300ms", 0.3), ("10m", 600), ("1h", 3600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)
