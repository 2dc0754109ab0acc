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
