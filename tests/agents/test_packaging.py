"""The units, the manifest and the example configurations say what the code does."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ruamel.yaml import YAML

from agents.faults.catalog import CATALOG
from agents.helper import settings as helper_settings
from agents.helper.settings import HelperSettings
from agents.settings import load

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
UNITS = ("ft-agent", "ft-agent-helper")
KEPT = {"CAP_NET_ADMIN", "CAP_KILL"}
AT_START = {"CAP_CHOWN", "CAP_SETPCAP"}


def unit(name: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(PACKAGING / "systemd" / f"{name}.service")
    return dict(parser["Service"])


def yaml(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text())


def helper() -> HelperSettings:
    return msgspec.convert(yaml(PACKAGING / "helper.yaml"), HelperSettings)


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_ends_nothing_but_its_process_and_starts_it_again(name: str) -> None:
    found = unit(name)
    assert found["KillMode"] == "process", "watchdog, fork server and replicas outlive it"
    assert found["Restart"] == "always"
    assert found["NoNewPrivileges"] == "yes"
    assert found["ProtectSystem"] == "strict"
    program = Path(found["ExecStart"].split()[0]).name
    assert f'{program} = "agents.' in (ROOT / "pyproject.toml").read_text()


def test_only_the_helper_has_rights() -> None:
    agent, other = unit("ft-agent"), unit("ft-agent-helper")
    assert (agent["User"], agent["CapabilityBoundingSet"]) == ("ftctl", "")
    assert set(other["CapabilityBoundingSet"].split()) == KEPT | AT_START
    assert "AF_INET" not in other["RestrictAddressFamilies"]
    assert helper().agent_user == agent["User"]
    assert agent["User"] in (PACKAGING / "systemd" / "ftctl.sysusers").read_text().split()


def test_paths_of_units_and_configurations_are_the_same(tmp_path: Path) -> None:
    agent, other = unit("ft-agent"), unit("ft-agent-helper")
    settings, allowed = load(PACKAGING / "agent.yaml"), helper()
    assert str(settings.helper_socket) == allowed.socket
    assert allowed.socket.startswith(f"/run/{other['RuntimeDirectory']}/")
    assert allowed.state_dir == f"/var/lib/{other['StateDirectory']}"
    assert str(settings.state_dir) == f"/var/lib/{agent['StateDirectory']}"
    assert str(settings.unix_socket).startswith(f"/run/{agent['RuntimeDirectory']}/")
    assert (settings.node, settings.rails, settings.management_nic) == (
        allowed.node,
        allowed.rails,
        allowed.management_nic,
    )
    if os.geteuid() == 0:
        copy = tmp_path / "helper.yaml"
        shutil.copy(PACKAGING / "helper.yaml", copy)
        copy.chmod(0o644)
        assert helper_settings.load(copy) == allowed


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_finds_nothing_wrong_with_a_unit(name: str, tmp_path: Path) -> None:
    text = (PACKAGING / "systemd" / f"{name}.service").read_text()
    for program in ("ft-agent-helper", "ft-agent"):
        text = text.replace(f"ExecStart=/opt/ftctl/bin/{program} ", "ExecStart=/bin/true ")
    copy = tmp_path / f"{name}.service"
    copy.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert name not in done.stderr, done.stderr  # an unknown or ill-formed setting is only warned of


def test_the_manifest_shows_the_same_split() -> None:
    pod = yaml(PACKAGING / "kubernetes" / "ft-agent.yaml")["spec"]["template"]["spec"]
    agent, other = pod["containers"]
    for container in (agent, other):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert "privileged" not in context
        assert context["capabilities"]["drop"] == ["ALL"]
        assert {m["name"] for m in container["volumeMounts"]} <= {v["name"] for v in pod["volumes"]}
        assert f'{container["command"][0]} = "agents.' in (ROOT / "pyproject.toml").read_text()
    assert agent["securityContext"]["runAsNonRoot"] is True
    assert "add" not in agent["securityContext"]["capabilities"]
    assert {f"CAP_{one}" for one in other["securityContext"]["capabilities"]["add"]} == KEPT | AT_START
    mounts = {m["name"]: m for m in agent["volumeMounts"]}
    assert mounts["helper-socket"]["readOnly"] is True
    assert "helper-state" not in mounts
    assert pod["hostNetwork"] is True
    assert pod["hostPID"] is True


@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_the_manifest_is_valid_to_kubernetes(version: str) -> None:
    """Against the published schemas, in which no field may be unknown."""
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install 'ftctl[packaging]' (100 MB of schemas)")
    manifest = yaml(PACKAGING / "kubernetes" / "ft-agent.yaml")
    schemas.validate(manifest, version, strict=True)
    manifest["spec"]["template"]["spec"]["containers"][0]["securityContext"]["runAsNobody"] = True
    with pytest.raises(schemas.ValidationError, match="runAsNobody"):
        schemas.validate(manifest, version, strict=True)


def test_what_changes_a_device_or_signals_a_process_is_for_the_helper() -> None:
    """A fault that only tells a rank something over the agent's own connection is not."""
    asks_a_rank = {"replica-crash-at", "state-corrupt"}
    for fault in CATALOG.values():
        needs = fault.target in ("nic", "coordinator") or (fault.target == "replica" and fault.kind not in asks_a_rank)
        assert fault.privileged == (needs or fault.kind in ("partition", "node-down")), fault.kind
