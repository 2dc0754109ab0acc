"""The agent's one configuration file (YAML), read once at start. Unknown keys are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from agents.api.breaker import AFTER_S, REPLICAS_PERCENT
from agents.api.models import DEFAULT_PORT
from agents.api.safety import BlastSettings, ProtectRules
from agents.monitors.portlimits import NicLimits, RdmaLimits
from agents.section import Section
from ftar_core.wire.ids import valid_name


class SettingsProblem(Exception):
    """The configuration cannot be used; the message names the file, the key and the reason."""


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


class SimulatedGpuSettings(Section):
    """GPUs that are not there, for the lab; their state is in the agent's state_dir, under gpus/."""

    count: int = Field(ge=1, le=64)
    profile: Literal["h100", "h200"] = "h100"


class PolicySettings(Section):
    """What is done about verdicts. `file`: rules in the place of the package's own (agents/policies/default.yaml)."""

    mode: Literal["observe", "recommend", "act"] = "observe"  # until `ftctl policy set-mode` says otherwise
    file: Path | None = None


class BreakerSettings(Section):
    """Faults of this agent are halted when fewer of the job's replicas contribute for so long; 0: never."""

    replicas_percent: float = Field(default=REPLICAS_PERCENT, ge=0, le=100)
    after_s: float = Field(default=AFTER_S, ge=0.5, le=600)


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
    helper_socket: Path | None = None  # of ft-agent-helper, where this agent runs without root
    protect: ProtectRules = Field(default_factory=ProtectRules)  # what no fault touches, whoever asks
    blast_radius: BlastSettings = Field(default_factory=BlastSettings)  # how much may be hit at once, of the cluster
    breaker: BreakerSettings = Field(default_factory=BreakerSettings)  # what halts faults by itself
    max_faults: int = Field(default=4, ge=0, le=1000)  # at once on this node
    default_duration_s: float = Field(default=60.0, gt=0)
    max_duration_s: float = Field(default=900.0, gt=0, le=86_400)
    poll_s: float = Field(default=1.0, ge=0.1, le=60)
    watch_links: bool = True  # ask processes with links for their state (ftctl links)
    nvml_deadline_s: float = Field(default=5.0, ge=0.1, le=600)
    expect_gpus: int | None = Field(default=None, ge=0, le=1024)  # fewer that answer is a fault of the node
    simulated_gpus: SimulatedGpuSettings | None = None
    kernel_log: Path | None = Path("/dev/kmsg")  # none: it is not read
    kmsg_device: Path | None = Path("/dev/kmsg")  # where gpu-xid --kmsg writes its line; none: nowhere
    verdict_files: list[Path] = Field(default_factory=list, max_length=16)  # what other monitors write (JSON)
    xid_table: Path | None = None  # changes to agents/health/xids.yaml, in the same form
    sysfs_root: Path = Path("/sys")
    nics: NicLimits = NicLimits()
    rdma: RdmaLimits = RdmaLimits()
    coordinator: CoordinatorAccess | None = None
    supervision: Supervision = Field(default_factory=Supervision)
    policy: PolicySettings = Field(default_factory=PolicySettings)

    @field_validator("node")
    @classmethod
    def _node_is_a_name(cls, node: str) -> str:
        if not valid_name(node):
            raise ValueError(f"{node!r} is no node name (letters a-z, digits and ._- are)")
        return node

    @field_validator("rails")
    @classmethod
    def _rails_are_devices(cls, rails: list[str]) -> list[str]:
        for rail in rails:
            if not 0 < len(rail.encode()) < 16 or "/" in rail or rail.split() != [rail]:
                raise ValueError(f"{rail!r} is no name of a network device")
        if len(set(rails)) != len(rails):
            raise ValueError("a rail is named twice")
        return rails

    @model_validator(mode="after")
    def _fit_together(self) -> AgentSettings:
        if self.management_nic is not None and self.management_nic in self.rails:
            raise ValueError(f"{self.management_nic} is named as a rail and as the management NIC")
        if self.default_duration_s > self.max_duration_s:
            raise ValueError("default_duration_s is longer than max_duration_s")
        return self


def load(path: Path) -> AgentSettings:
    """Read and check the file. Raises SettingsProblem."""
    try:
        data: Any = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsProblem(f"{path}: {error.strerror}") from None
    except (YAMLError, ValueError) as error:
        where = " ".join(str(error).split())
        raise SettingsProblem(f"{path}: not YAML: {where}") from None
    if not isinstance(data, dict):
        raise SettingsProblem(f"{path}: a mapping of settings is expected")
    try:
        return AgentSettings.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "settings"
        words = {"extra_forbidden": "there is no such setting", "missing": "is missing"}
        reason = words.get(first["type"], first["msg"].removeprefix("Value error, "))
        raise SettingsProblem(f"{path}: {where}: {reason}") from None
