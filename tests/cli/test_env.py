"""`ftctl env nccl`, as a launch script uses it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ftar_core import ncclenv
from ftctl.context import World
from ftctl.exit_codes import ExitCode

from .conftest import Run


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A plugin in a directory that a shell would split, and no RDMA."""
    plugin = tmp_path / "a b" / ncclenv.LIBRARY
    monkeypatch.setattr(ncclenv, "plugin_path", lambda: plugin)
    monkeypatch.setattr(ncclenv, "INFINIBAND", tmp_path / "infiniband")
    return plugin


def test_lines_for_a_shell(bare: Run, installed: Path) -> None:
    result = bare("env", "nccl", "--rails", "rail0,rail1", "--give-up-after", "10")
    assert result.code == ExitCode.OK
    exported = dict(shlex.split(line)[1].split("=", 1) for line in result.out.splitlines())
    assert exported == {
        "NCCL_NET_PLUGIN": str(installed),
        "NCCL_NET": "FTAR",
        "FTAR_NET_RAILS": "rail0,rail1",
        "FTAR_NET_TIMEOUT_S": "10",
    }
    assert "NCCL_SOCKET_IFNAME" in result.err


def test_json(bare: Run, installed: Path) -> None:
    result = bare("env", "nccl", "-o", "json")
    assert result.json() == {"schema": 1, "env": {"NCCL_NET_PLUGIN": str(installed), "NCCL_NET": "FTAR"}}


def test_a_setting_that_leads_around_the_plugin(bare: Run, world: World) -> None:
    world.environ = {"NCCL_NET_PLUGIN": "none"}
    result = bare("env", "nccl")
    assert (result.code, result.out) == (ExitCode.USAGE, "")
    assert "NCCL_NET_PLUGIN=none" in result.err
    assert "unset NCCL_NET_PLUGIN" in result.err


def test_rdma_needs_a_decision(bare: Run, tmp_path: Path) -> None:
    port = tmp_path / "infiniband" / "mlx5_3" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    refused = bare("env", "nccl")
    assert refused.code == ExitCode.USAGE
    assert "mlx5_3/1" in refused.err
    assert "--allow-sockets" in refused.err
    assert bare("env", "nccl", "--allow-sockets").code == ExitCode.OK


TWO = "a=127.0.0.1,b=127.0.0.2"


def test_it_says_which_rails_this_machine_would_use(bare: Run) -> None:
    result = bare("env", "nccl", "--rails", TWO)
    assert (result.code, len(result.out.splitlines())) == (ExitCode.OK, 3)
    assert "note: on this machine the rails are a, b" in result.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rails", "a=127.0.0.1"), "a is the only rail: the job ends when it fails"),
        (("--rails", TWO, "--backup", "none"), "the rails a, b have no backup"),
        (("--rails", "nosuch0"), "there is no network device 'nosuch0'"),
        (("--rails", TWO, "--backup", "a=c"), "there is no rail 'c'"),
        (("--rails", TWO, "--token-file", "/nonexistent/token"), "FTAR_TOKEN_FILE=/nonexistent/token"),
    ],
)
def test_a_job_that_would_end_with_its_rail_is_warned_of(bare: Run, options: tuple[str, ...], words: str) -> None:
    result = bare("env", "nccl", *options)
    assert result.code == ExitCode.OK  # the nodes may have other NICs than this machine
    assert "warning: " in result.err
    assert words in result.err


def test_settings_that_stand_in_the_environment_are_tried_as_well(bare: Run, world: World) -> None:
    world.environ = {"FTAR_NET_OPTIONS": "heartbeat=20"}
    assert "'heartbeat=20' is not NAME=VALUE" in bare("env", "nccl", "--rails", TWO).err


def test_an_empty_token_file_is_no_directory(bare: Run) -> None:
    result = bare("env", "nccl", "--token-file", "")
    assert (result.code, result.out) == (ExitCode.USAGE, "")


def test_who_has_a_token_is_not_told_to_make_one(bare: Run, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    assert "set FTAR_TOKEN_FILE" not in bare("env", "nccl", "--rails", TWO, "--token-file", str(token)).err
