"""The agent's one configuration file (YAML), read once at start. Unknown keys are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from agents.api.models import DEFAULT_PORT


class SettingsProblem(Exception):
    """The configuration cannot be used; the message names the file, the key and the reason."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CoordinatorAccess(Section):
    address: str  # HOST:PORT
    job: str
    token_file: Path  # the operator token of the job


class Supervised(Section):
    """A replica rank that this agent starts and keeps running (the lab, bare metal)."""

    replica: str
    rank: int = 0
    module: str  # run as `python -m module args...` in a process forked from the pre-imported one
    args: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    autostart: bool = True


class Supervision(Section):
    preload: list[str] = Field(default_factory=list)  # modules imported once, before any fork
    grace_s: float = 5.0  # SIGTERM to SIGKILL
    backoff_s: float = 0.2  # first restart delay, doubling to backoff_max_s, forgotten after healthy_s of running
    backoff_max_s: float = 30.0
    healthy_s: float = 30.0
    replicas: list[Supervised] = Field(default_factory=list)


class AgentSettings(Section):
    """`listen` is HOST:PORT; off loopback it needs tls_cert and tls_key. `tokens` maps principals to roles."""

    node: str
    state_dir: Path
    listen: str | None = f"127.0.0.1:{DEFAULT_PORT}"
    unix_socket: Path | None = None
    ranks_socket: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tokens_file: Path  # YAML, mode 0600: [{principal, role, token}, ...]
    rails: list[str] = Field(default_factory=list)  # network devices that may be faulted
    management_nic: str | None = None
    allow_faults: bool = False
    max_faults: int = 4
    default_duration_s: float = 60.0
    max_duration_s: float = 900.0
    poll_s: float = 1.0
    nvml_deadline_s: float = 5.0
    sysfs_root: Path = Path("/sys")
    coordinator: CoordinatorAccess | None = None
    supervision: Supervision = Field(default_factory=Supervision)


def load(path: Path) -> AgentSettings:
    """Read and check the file. Raises SettingsProblem."""
    try:
        data: Any = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsProblem(f"{path}: {error.strerror}") from None
    except YAMLError as error:
        raise SettingsProblem(f"{path}: not YAML: {error}") from None
    if not isinstance(data, dict):
        raise SettingsProblem(f"{path}: a mapping of settings is expected")
    try:
        return AgentSettings.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SettingsProblem(f"{path}: {where}: {first['msg']}") from None
