"""`ftar_core.nccl.enable`: the environment for NCCL, and whatever would lead NCCL around the plugin in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ftar_core.nccl
from ftar_core import ncclenv
from ftar_core.errors import FtarError, SettingsError


def rdma(root: Path, state: str, rate: str = "100 Gb/sec (4X EDR)\n") -> Path:
    port = root / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)
    (port / "rate").write_text(rate)
    return root


def test_it_sets_what_nccl_reads(tmp_path: Path) -> None:
    env = {"PATH": "/bin"}
    made = ftar_core.nccl.enable(
        rails=["rail0", "r1=10.0.0.1"], backup={"rail0": "r1"}, timeout_s=12.5, environ=env, infiniband=tmp_path
    )
    assert made == {
        "NCCL_NET_PLUGIN": str(ncclenv.plugin_path()),
        "NCCL_NET": "FTAR",
        "FTAR_NET_RAILS": "rail0,r1=10.0.0.1",
        "FTAR_NET_BACKUP": "rail0=r1",
        "FTAR_NET_TIMEOUT_S": "12.5",
    }
    assert env == {"PATH": "/bin", **made}
    assert ftar_core.nccl.enable(environ=env, infiniband=tmp_path)["NCCL_NET"] == "FTAR"  # twice is fine


def test_the_mode_joins_the_other_options(tmp_path: Path) -> None:
    env = {"FTAR_NET_OPTIONS": "heartbeat_ms=20,mode=backup"}
    ftar_core.nccl.enable(mode="stripe", environ=env, infiniband=tmp_path)
    assert env["FTAR_NET_OPTIONS"] == "heartbeat_ms=20,mode=stripe"
    with pytest.raises(SettingsError, match="mode='strip': no such mode") as refused:
        ftar_core.nccl.enable(mode="strip", environ=env, infiniband=tmp_path)
    assert "backup, stripe" in (refused.value.hint or "")


def test_torch_stays_unloaded() -> None:
    code = "import sys, ftar_core.nccl as n; n.enable(environ={}, allow_sockets=True); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"NCCL_NET": "Socket"}, "NCCL_NET=Socket"),
        ({"NCCL_NET_PLUGIN": "none"}, "NCCL_NET_PLUGIN=none"),
        ({"NCCL_NET_PLUGIN": "aws-ofi"}, "NCCL_NET_PLUGIN=aws-ofi"),
        ({"NCCL_NET_DISABLE_INTRA": "1"}, "NCCL_NET_DISABLE_INTRA=1"),
        ({"NCCL_COLLNET_ENABLE": "1"}, "NCCL_COLLNET_ENABLE=1"),
    ],
)
def test_a_setting_that_leads_around_the_plugin_is_refused_and_nothing_is_set(
    tmp_path: Path, env: dict[str, str], words: str
) -> None:
    before = dict(env)
    with pytest.raises(SettingsError, match=words) as refused:
        ftar_core.nccl.enable(environ=env, infiniband=tmp_path)
    assert refused.value.hint.startswith("run: unset")
    assert env == before


def test_settings_that_change_nothing_are_not_complained_about(tmp_path: Path) -> None:
    env = {"NCCL_NET": "ftar", "NCCL_NET_PLUGIN": "ftar", "NCCL_NET_DISABLE_INTRA": "0", "NCCL_DEBUG": "INFO"}
    assert ftar_core.nccl.enable(environ=env, infiniband=tmp_path)


def test_an_active_rdma_port_is_a_choice_for_the_user(tmp_path: Path) -> None:
    root = rdma(tmp_path, "4: ACTIVE\n")
    with pytest.raises(SettingsError) as refused:
        ftar_core.nccl.enable(environ={}, infiniband=root)
    assert "mlx5_0/1 (100 Gb/sec (4X EDR))" in str(refused.value)
    assert "GB/s" in str(refused.value)  # what it would cost
    assert "allow_sockets=True" in refused.value.hint
    assert ftar_core.nccl.enable(environ={}, infiniband=root, allow_sockets=True)


@pytest.mark.parametrize("state", ["1: DOWN\n", "2: INIT\n", "", "junk"])
def test_an_rdma_port_that_is_not_active_is_none(tmp_path: Path, state: str) -> None:
    assert ftar_core.nccl.enable(environ={}, infiniband=rdma(tmp_path, state))


@pytest.mark.parametrize(
    "bad", [{"rails": []}, {"rails": "a,,b"}, {"backup": {}}, {"timeout_s": 0}, {"timeout_s": float("nan")}]
)
def test_arguments_that_mean_nothing(tmp_path: Path, bad: dict[str, object]) -> None:
    with pytest.raises(FtarError):
        ftar_core.nccl.enable(environ={}, infiniband=tmp_path, **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "abi"),
    [
        ("2.19.3", None),
        ("2.20.5", 8),
        ("2.23.4", 8),
        ("2.27.7", 8),
        ("2.28.0", 11),
        ("2.29.7", 11),
        ("2.30.1", 12),
        ("2.32.0", 12),
    ],
)
def test_which_interface_an_nccl_loads(tmp_path: Path, version: str, abi: int | None) -> None:
    library = tmp_path / "libnccl.so.2"
    # Across the border of two reads, as it may stand in a library of 200 MB.
    library.write_bytes(
        os.urandom(16) + bytes((1 << 22) - 26) + f"NCCL version {version}+cuda12.4\0".encode() + bytes(100)
    )
    found = ncclenv.find_nccl([tmp_path / "nothing", library])
    assert found is not None
    assert (found.version_text, found.abi) == (version, abi)
    assert not found.newer_than_known


def test_an_nccl_from_the_future_is_said_to_be_untried(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"NCCL version 2.40.1+cuda13")
    found = ncclenv.find_nccl([library])
    assert found is not None
    assert found.newer_than_known


def test_a_library_that_is_no_nccl(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"not a library")
    assert ncclenv.find_nccl([library]) is None


def test_a_plugin_that_cannot_be_loaded_is_a_reason_not_a_traceback() -> None:
    """The trial's process ends before it has said anything, here for want of a standard library."""
    found = ncclenv.trial({"PYTHONHOME": "/nonexistent"}, {})
    assert found.devices == ()
    assert "cannot be loaded (" in found.refused
    assert "\n" not in found.refused


def test_a_trial_names_the_rails() -> None:
    found = ncclenv.trial({"FTAR_NET_RAILS": "a=127.0.0.1,b=127.0.0.2"}, {})
    assert found == ncclenv.Trial(("a", "b"), "")
