"""ftctl policy: files are checked without a cluster, modes are set on all nodes at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.api.policyfile import DEFAULT

from .conftest import Run
from .fake_agent import FakeCluster


def test_a_policy_file_is_checked_without_a_cluster(ftctl: Run, tmp_path: Path) -> None:
    done = ftctl("policy", "validate", str(DEFAULT))
    assert done.code == 0
    assert "it can be used" in done.err
    bad = tmp_path / "policy.yaml"
    bad.write_text("version: 1\nrules:\n- {name: a, action: fly}\n")
    done = ftctl("policy", "validate", str(bad))
    assert done.code == 2
    assert done.err.startswith(f"error: policy {bad}: 3: action 'fly' is none of")
    assert done.err.splitlines()[1].startswith("next:  compare it with the rules that ship: ")
    assert Path(done.err.split(": ")[-1].strip()) == DEFAULT
    missing, binary = tmp_path / "none.yaml", tmp_path / "binary.yaml"
    binary.write_bytes(b"version: \xff")
    for path, why in ((missing, "No such file or directory"), (binary, "not UTF-8 text")):
        done = ftctl("policy", "validate", str(path))
        assert (done.code, done.err.splitlines()[0]) == (2, f"error: policy {path}: {why}")


def test_the_mode_is_set_everywhere_and_shown(ftctl: Run, cluster: FakeCluster) -> None:
    done = ftctl("policy", "set-mode", "act", "--reason", "trusted")
    assert done.code == 0, done.err
    assert done.err == "the policy's mode is act on 3 of 3 nodes\n"
    assert "(3 of them before already)" in ftctl("policy", "set-mode", "act", "--reason", "again").err
    shown = ftctl("policy", "show")
    assert shown.code == 0, shown.err
    assert "act" in shown.out
    assert "well-again" in shown.out
    assert [node["mode"] for node in ftctl("policy", "show", "-o", "json").json()["nodes"]] == ["act"] * 3
    cluster["node1"].stop()
    assert ftctl("policy", "set-mode", "observe", "--reason", "x").code == 6
    assert "not changed on node1" in ftctl("policy", "set-mode", "observe", "--reason", "x").err


@pytest.mark.parametrize("words", [("dance", "--reason", "x"), ("act", "--reason", " "), ("act",), ()])
def test_what_is_wrong_is_one_line(ftctl: Run, words: tuple[str, ...]) -> None:
    done = ftctl("policy", "set-mode", *words)
    assert done.code == 2
    assert done.err.startswith("error: ")
