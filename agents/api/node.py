"""A node as its agent sees it: interfaces, GPUs, processes, links (models.py has the routes)."""

from __future__ import annotations

from pydantic import Field

from agents.api.base import Answer
from agents.api.cordon import CordonView
from agents.api.faults import FaultView
from agents.api.halt import HaltView
from agents.api.safety import BlastView, ProtectView
from agents.api.words import Health


class Alive(Answer):
    """GET /healthz"""

    ok: bool
    node: str
    version: str


class AgentInfo(Answer):
    pid: int
    age_s: float
    version: str
    rss_mb: float
    cpu_percent: float
    allow_faults: bool
    watchdog_pid: int | None = None


class NicView(Answer):
    """One network interface. `role`: rail, mgmt or other. `state` healthy|degraded|unhealthy with its reason."""

    name: str
    role: str
    present: bool
    up: bool  # administratively
    carrier: bool
    speed_mbit: int | None = None
    duplex: str = ""  # full, half; empty: not known
    pcie_width: int | None = None  # lanes
    addresses: list[str] = Field(default_factory=list)  # with prefix length
    mac: str = ""
    mtu: int = 0
    rx_bytes: int = 0
    tx_bytes: int = 0
    rx_errors: int = 0
    tx_errors: int = 0
    rx_dropped: int = 0
    tx_dropped: int = 0
    carrier_changes: int = 0
    state: Health = Health.UNKNOWN
    reason: str = ""
    injected: bool = False  # its state is a fault's doing


class GpuView(Answer):
    """`readings`: what else it tells, by names that end in their unit (nvml_child.py); absent: not supported.
    `simulated`: it is not hardware, but a file that says so."""

    index: int
    uuid: str
    name: str
    temperature_c: float | None = None
    utilization_percent: float | None = None
    memory_used_mb: float | None = None
    memory_total_mb: float | None = None
    power_w: float | None = None
    state: Health = Health.UNKNOWN
    reason: str = ""
    simulated: bool = False
    readings: dict[str, float] = Field(default_factory=dict)
    throttle: list[str] = Field(default_factory=list)
    pids: list[int] = Field(default_factory=list)

    @property
    def title(self) -> str:
        """Its name for people, who are told wherever it stands that it is not hardware."""
        return f"{self.name} (simulated)" if self.simulated else self.name


class GpuSummary(Answer):
    """`note` says why there are none, or why the reading is old ("no GPUs (NVML not found)")."""

    devices: list[GpuView] = Field(default_factory=list)
    note: str = ""
    state: Health = Health.UNKNOWN
    simulated: bool = False


class ProcessView(Answer):
    """A replica's process as supervised here. state: running | exited | backoff | stopped | starting | failed"""

    replica: str
    rank: int
    pid: int | None
    state: str
    exit_code: int | None = None
    restarts: int = 0
    next_start_s: float | None = None
    cpu_percent: float | None = None
    rss_mb: float | None = None
    status: str = ""  # psutil's word: running, sleeping, stopped, zombie
    log: str = ""
    reason: str = ""


class LinkView(Answer):
    peer: str
    rail: str
    direction: str
    state: str
    active: bool
    reason: str
    since_s: float
    flaps: int
    resumes: int
    bytes: int


class RankView(Answer):
    """A rank that registered with this agent."""

    job: str
    replica: str
    rank: int
    pid: int
    node: str
    state: str
    step: int
    term: int
    epoch: int
    contributors: list[str] = Field(default_factory=list)
    links: list[LinkView] = Field(default_factory=list)
    last_stall_ms: float = 0.0
    tokens_per_s: float = 0.0
    loss: float | None = None
    compute_ms: float | None = None  # a step of this rank: the median of the last 20
    wait_ms: float | None = None
    silent_s: float = 0.0  # since the last report


class LinkRailView(Answer):
    """One rail of a process, over all its connections.

    `state` is the worst one of them (UP, HOLD, PROBING, SILENT, DOWN), with the reason of that connection and its age.
    `moved`: connections that prefer this rail and send over another one now, by that one's name. `flaps` is the most of
    one connection, not yet forgotten; `detect_ms` how long the last loss took to notice, the longest of them.
    """

    rail: str
    device: str
    address: str
    links: int
    up: int = 0
    states: dict[str, int] = Field(default_factory=dict)
    state: str = ""
    reason: str = ""
    since_s: float = 0.0
    active: int = 0  # connections whose data it carries
    moved: dict[str, int] = Field(default_factory=dict)
    flaps: int = 0
    bytes: int = 0
    hold_left_s: float = 0.0
    detect_ms: float | None = None
    retransmits: int = 0


class LinkProcessView(Answer):
    """A process with links, found by its status socket. kind: ring (a training rank's) | nccl (the NCCL plugin's).

    `rank` is its RANK as text, `name` what its peers call it. `silent_s`: since its last answer; `note` says why.
    """

    pid: int
    uid: int
    kind: str
    job: str
    name: str
    rank: str
    mode: str
    age_s: float
    silent_s: float = 0.0
    note: str = ""
    links: int = 0
    left_out: int = 0  # links that found no room in its answer
    peers: int = 0
    resumes: int = 0
    rails: list[LinkRailView] = Field(default_factory=list)


class LinkRow(Answer):
    """Connections of one process to one peer over one rail, in one direction; with `each`, one connection (`link`)."""

    pid: int
    kind: str
    rank: str
    name: str
    peer: str
    direction: str  # out | in
    rail: str
    device: str
    address: str  # the peer's
    link: int | None = None
    links: int
    up: int
    state: str  # the worst
    reason: str
    since_s: float
    active: int
    flaps: int
    resumes: int
    bytes: int
    hold_left_s: float = 0.0
    detect_ms: float | None = None
    retransmits: int = 0


class LinksAnswer(Answer):
    """GET /v1/links. `left_out`: rows beyond the limit."""

    links: list[LinkRow]
    left_out: int = 0


class ProblemView(Answer):
    """`action` is the command or step recommended, `reason` the sentence why."""

    object: str
    reason: str
    action: str = ""
    in_force: bool = False  # a fault may be in force that the agent cannot take back


class NodeView(Answer):
    """GET /v1/node"""

    schema_: int = Field(default=1, alias="schema")
    name: str
    time: float
    agent: AgentInfo
    nics: list[NicView]
    gpus: GpuSummary
    ranks: list[RankView]
    processes: list[ProcessView]
    link_processes: list[LinkProcessView] = Field(default_factory=list)
    cordon: CordonView | None = None  # set apart: no replica is started here
    halt: HaltView | None = None  # no fault is injected here
    protect: list[ProtectView] = Field(default_factory=list)  # what no fault may touch, a file each
    blast: BlastView | None = None  # how much may be hit at once; None: an agent that knows no such limits
    faults: list[FaultView]  # not reverted ones, and those reverted in the last minute
    problems: list[ProblemView]
