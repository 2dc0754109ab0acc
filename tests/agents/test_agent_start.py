"""How the agent starts, or says in one line why it does not; TLS; and what it imports."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import certificate
from live_agent import TOKENS, LiveAgent, live_agent, write

from agents import daemon, settings, tokens
from agents.api.words import Role


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line with which an agent refuses to start."""

    def start(agent: LiveAgent, code: int = 2) -> str:
        write(agent.config, agent.settings)
        monkeypatch.setattr(sys, "argv", ["ft-agent", "--config", str(agent.config)])
        monkeypatch.setattr(os, "umask", lambda _mask: 0)
        with pytest.raises(SystemExit) as caught:
            daemon.main()
        assert caught.value.code == code
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("ft-agent: ")
        return lines[0]

    return start


Refusal = Callable[..., str]


def test_tokens_that_others_can_read_are_no_tokens(refusal: Refusal) -> None:
    with live_agent() as agent:
        (agent.root / "tokens.yaml").chmod(0o644)
        assert "chmod 600" in refusal(agent)


def test_off_loopback_only_with_tls(refusal: Refusal) -> None:
    with live_agent(listen="0.0.0.0:0") as agent:
        assert "tls_cert" in refusal(agent)


def test_an_unknown_setting_is_an_error(refusal: Refusal) -> None:
    with live_agent(colour="red") as agent:
        assert "colour" in refusal(agent)


def test_a_taken_port_is_named(refusal: Refusal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with live_agent(listen=f"127.0.0.1:{port}") as agent:
            line = refusal(agent)
            assert f"127.0.0.1:{port}" in line
            assert "already" in line


def test_a_second_agent_on_the_same_state_is_refused_and_the_first_lives(refusal: Refusal) -> None:
    with live_agent() as agent:
        agent.start("--allow-faults")
        fault = agent.inject(kind="noop", duration_s=60)
        second = LiveAgent(agent.root, **{**agent.settings, "unix_socket": str(agent.root / "b.sock")})
        second.config = agent.root / "b.yaml"
        assert f"another agent (pid {agent.pid})" in refusal(second, code=1)
        assert agent.get(f"/v1/faults/{fault['id']}").json()["state"] == "active"


def test_without_allow_faults_nothing_is_injected_and_no_watchdog_runs() -> None:
    with live_agent() as agent:
        agent.start()
        refused = agent.post("/v1/faults", {"kind": "noop"})
        assert (refused.status_code, refused.json()["code"]) == (403, "faults-disabled")
        assert "--allow-faults" in refused.json()["hint"]
        view = agent.get("/v1/node").json()["agent"]
        assert view["watchdog_pid"] is None
        assert not view["allow_faults"]


def test_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with live_agent(listen="127.0.0.1:0", tls_cert=str(cert), tls_key=str(key)) as agent:
        agent.start()
        started = agent.get("/v1/events").json()["events"][0]["reason"]
        port = int(started.split("127.0.0.1:")[1].split(",")[0])
        context = ssl.create_default_context(cafile=str(cert))
        headers = {"Authorization": f"Bearer {TOKENS['viewer']}"}
        response = httpx.get(f"https://127.0.0.1:{port}/v1/node", verify=context, headers=headers)
        assert response.json()["name"] == "node1"
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/healthz")
        assert agent.get("/healthz").status_code == 200, "the Unix socket needs no TLS"


def test_a_key_that_is_none_is_said_in_one_line(tmp_path: Path, refusal: Refusal) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("not a key")
    junk.chmod(0o600)
    with live_agent(listen="127.0.0.1:0", tls_cert=str(junk), tls_key=str(junk)) as agent:
        assert "not a certificate" in refusal(agent)


# --- tokens -------------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"principal": "ann", "role": "chaos", "token": "a-token-of-16-ch"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "at least one"),
        ({"principal": "ann"}, "list"),
        (["ann"], "entry 1"),
        ([{**GOOD, "more": 1}], "entry 1"),
        ([{"principal": "ann", "role": "chaos"}], "entry 1"),
        ([{**GOOD, "role": "king"}], "king"),
        ([{**GOOD, "token": "short"}], "16 characters"),
        ([GOOD, {**GOOD, "principal": "bob"}], "same token as ann"),
        ([{**GOOD, "token": 12345678901234567}], "entry 1"),
    ],
)
def test_a_token_file_that_is_wrong(tmp_path: Path, data: Any, words: str) -> None:
    path = tmp_path / "tokens.yaml"
    write(path, data)
    with pytest.raises(tokens.TokensProblem, match=words) as caught:
        tokens.load(path)
    assert GOOD["token"] not in str(caught.value)


def test_a_token_file_that_is_no_yaml_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.touch(mode=0o600)
    path.write_text("- {token: very-secret-token-123: [")
    with pytest.raises(tokens.TokensProblem) as caught:
        tokens.load(path)
    assert "very-secret" not in str(caught.value)


def test_a_pipe_instead_of_a_token_file_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    os.mkfifo(path, 0o600)
    with pytest.raises(tokens.TokensProblem, match="not a regular file"):
        tokens.load(path)


def test_a_token_names_its_principal(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    write(path, [GOOD, {"principal": "bob", "role": "viewer", "token": "b-token-of-16-ch"}])
    known = tokens.load(path)
    assert known.whose(GOOD["token"]) == tokens.Principal("ann", Role.CHAOS)
    assert known.whose("b-token-of-16-ch") == tokens.Principal("bob", Role.VIEWER)
    assert known.whose("") is None
    assert known.whose(GOOD["token"] + "x") is None


def test_a_token_file_that_changes_counts_at_once_and_one_that_is_wrong_does_not(tmp_path: Path) -> None:
    path, now, told = tmp_path / "tokens.yaml", [0.0], []
    write(path, [GOOD])
    known = tokens.TokenFile(path, tokens.load(path), lambda kind, why: told.append((kind, why)), lambda: now[0])
    assert known.whose(GOOD["token"]) is not None
    rotated = {**GOOD, "token": "another-token-of-ann"}
    write(path, [rotated])
    assert known.whose(rotated["token"]) is None, "the file is looked at once a second"
    now[0] += 1.0
    assert known.whose(rotated["token"]) == tokens.Principal("ann", Role.CHAOS)
    assert known.whose(GOOD["token"]) is None, "a token that was taken away lets nobody in any more"
    path.chmod(0o644)
    for _ in range(3):
        now[0] += 1.0
        assert known.whose(rotated["token"]) is not None, "a file that cannot be used takes nothing away"
    path.unlink()
    now[0] += 1.0
    assert known.whose(rotated["token"]) is not None
    assert [kind for kind, _ in told] == ["tokens.changed", "tokens.failed", "tokens.failed"]
    assert "chmod 600" in told[1][1]
    write(path, [GOOD])
    now[0] += 1.0
    assert known.whose(rotated["token"]) is None
    assert not any(rotated["token"] in why or GOOD["token"] in why for _, why in told)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory to somebody else")
def test_a_state_directory_of_somebody_else_is_not_written_to(refusal: Refusal, tmp_path: Path) -> None:
    """Its owner could have put links there, for root to write behind."""
    victim = tmp_path / "victim"
    with live_agent() as agent:
        agent.state.mkdir()
        for name in ("events.jsonl", "audit.jsonl", "agent.pid"):
            (agent.state / name).symlink_to(victim)
        os.chown(agent.state, 65533, 65533)
        assert f"state_dir {agent.state}: belongs to user 65533" in refusal(agent)
        os.chown(agent.state, 0, 0)
        agent.state.chmod(0o777)
        assert "chmod o-w" in refusal(agent)
    assert not victim.exists()


# --- weight -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("agents.injection.watchdog", ["pydantic", "fastapi", "asyncio", "psutil", "torch", "pyroute2"]),
        ("agents.daemon", ["torch", "pyroute2", "numpy", "pynvml"]),
        ("agents.api.models", ["fastapi", "torch", "psutil"]),
    ],
)
def test_what_is_not_imported(module: str, without: list[str]) -> None:
    code = f"import sys, {module}; print([m for m in {without} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# --- settings -----------------------------------------------------------------------------------------------------

MINIMAL = {"node": "node1", "state_dir": "/x", "tokens_file": "/x/tokens.yaml"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"colour": "red"}, "colour: there is no such setting"),
        ({"node": "Node 1"}, "no node name"),
        ({"rails": ["rail0", "rail0"]}, "named twice"),
        ({"rails": ["rail 0"]}, "no name of a network device"),
        ({"rails": ["a-name-of-16-byte"]}, "no name of a network device"),
        ({"rails": ["mgmt0"], "management_nic": "mgmt0"}, "as a rail and as the management NIC"),
        ({"max_duration_s": 0}, "max_duration_s"),
        ({"default_duration_s": 1000}, "longer than max_duration_s"),
        ({"poll_s": 0.0}, "poll_s"),
        ({"max_faults": "many"}, "max_faults"),
        ({"coordinator": {"address": "x:1"}}, "coordinator.job: is missing"),
        ({"node": None}, "node"),
    ],
)
def test_settings_that_are_wrong_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "agent.yaml"
    write(path, {**MINIMAL, **change})
    with pytest.raises(settings.SettingsProblem) as caught:
        settings.load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a list", "{", "\x00", "a: 1\na: 2"])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(text)
    with pytest.raises(settings.SettingsProblem):
        settings.load(path)
    with pytest.raises(settings.SettingsProblem, match="No such file"):
        settings.load(tmp_path / "none.yaml")
    path.write_bytes(b"node: \xff\xfe")
    with pytest.raises(settings.SettingsProblem):
        settings.load(path)
