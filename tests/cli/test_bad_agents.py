"""Agents that misbehave, and strangers on their sockets: one clear line, the right exit code, nothing believed."""

from __future__ import annotations

import pytest

from .conftest import Run
from .fake_agent import FakeCluster


@pytest.mark.parametrize(
    ("mode", "code", "expected"),
    [
        ("close", 6, "agent of node0"),
        ("junk", 1, "not of this version's contract"),
        ("redirect", 1, "redirect (HTTP 307), which is not followed"),
        ("huge", 1, "larger than 16777216 bytes"),
    ],
)
def test_an_agent_that_talks_nonsense(ftctl: Run, cluster: FakeCluster, mode: str, code: int, expected: str) -> None:
    cluster["node0"].mode = mode
    result = ftctl("faults", "--node", "node0")
    assert result.code == code
    assert expected in result.err
    assert "Traceback" not in result.err
    status = ftctl("status")  # the others still count
    assert status.code == code
    assert "job main  running" in status.out
    assert status.out.count("pid 77") == 2


def test_a_wrong_token_is_one_line_and_not_a_table_of_refusals(ftctl: Run, cluster: FakeCluster) -> None:
    wrong = cluster.folder / "wrong"
    wrong.write_text("f" * 32)
    wrong.chmod(0o600)
    for command in (("status",), ("drain", "replica", "r1", "--reason", "x"), ("inject", "noop", "--node", "node0")):
        result = ftctl(*command, "--token-file", str(wrong))
        assert result.code == 2
        assert result.out == ""
        assert "the token is not known here" in result.err
        assert "token_file in the inventory" in result.err
        assert "f" * 32 not in result.err


def test_no_agent_at_all(ftctl: Run, cluster: FakeCluster) -> None:
    for agent in cluster.agents.values():
        agent.stop()
    status = ftctl("status")
    assert status.code == 6
    assert status.out.count("nobody listens on") >= 3
    assert ftctl("drain", "replica", "r1", "--reason", "x").code in (2, 6)
    assert ftctl("wait", "replica", "r1", "--for", "drained", "--timeout", "200ms").code in (2, 6)
    assert ftctl("revert", "--all").code == 6
    cluster["node0"].path.unlink()
    assert "is not there" in ftctl("status").out


def test_proxies_in_the_environment_are_ignored(ftctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert ftctl("status").code == 0
