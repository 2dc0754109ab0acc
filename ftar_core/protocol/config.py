"""Settings of a job as the coordinator's machine reads them. Times in seconds; printed by `ftctl status`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace


@dataclass(frozen=True)
class Detection:
    """When silence means death. A closed connection needs none of this: it is seen in milliseconds.

    The defaults survive a second's pause of a loaded host; the lab's are short because its hosts are one machine.
    Eviction by heartbeats comes at twice the suspicion, so that a single late burst only shows up in `status`.
    """

    heartbeat_interval_s: float = 0.1
    suspect_after_s: float = 1.0
    evict_after_s: float = 2.0
    hung_after_s: float = 10.0  # hung: others waited for max(hung_after_s, hung_factor x median step)
    hung_factor: float = 5.0
    evict_hung: bool = False  # alert only, until the operator opts in
    evidence_wait_s: float = 5.0  # and then for the agent to say what a hung replica's threads do
    evict_diverged: bool = False  # whose results differ from the majority's is out before the commit; else an alarm
    explain_s: float = 0.5  # how long that commit waits for replicas to say what of their results it is
    straggler_factor: float = 1.5  # a hint about who computes so many times the median of the others
    straggler_steps: int = 20  # for so many steps in a row
    unreachable_wait_s: float = 0.3  # collect reports of both sides of a dead link before judging
    max_evictions: int = 1  # automatic ones within window_s; 0 = no limit
    eviction_window_s: float = 600.0


LAB_DETECTION = Detection(
    suspect_after_s=0.3, evict_after_s=0.5, hung_after_s=5.0, evidence_wait_s=3.0, max_evictions=0
)


@dataclass(frozen=True)
class JobConfig:
    """What an operator decides about a job. `steps` 0: endless, until `finish` or the scripts' own wish."""

    job: str
    replicas: int
    min_replicas: int = 1
    catchup_mbit: int = 0  # what all shadows together may fetch; 0: no limit
    spares: int = 0  # hot spares wanted beside them; a job without them runs as well
    start_timeout_s: float = 300.0  # then start with what is there, if it is at least min_replicas
    steps: int = 0
    continue_unattributed: bool = False  # results differ, nobody can say whose are wrong: an alarm instead of a hold
    fail_on_nonfinite: bool = False  # gradients that are not finite end the job; otherwise all skip that step
    detection: Detection = field(default_factory=Detection)
    recovery_wait_s: float = 30.0  # how long a restarted coordinator waits for all recorded members
    gather_s: float = 2.0  # the same when it stayed up itself and all contributors vanished at once
    hold_exit_s: float = 1800.0  # how long the job may hold before it gives up
    member_wait_s: float = 600.0  # how long members wait for a lost coordinator (told in Welcome)
    prepare_s: float = 2.0  # a join whose links are not up after this is tried again
    promote_wait_s: float = 0.1  # after a loss, how long the commit of that step waits for a hot spare's links
    record_retry_s: float = 1.0
    record_check_s: float = 5.0  # the record is written anew this often: finds a full disk, or a successor, early
    finish_wait_s: float = 30.0  # after the last commit, for members that still have to fetch it

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError("a job needs at least one replica")
        if not 1 <= self.min_replicas <= self.replicas:
            raise ValueError(f"min-replicas must be from 1 to {self.replicas} (the number of replicas)")
        if self.catchup_mbit < 0:
            raise ValueError("catchup_mbit must be 0 (no limit) or more")
        if self.spares < 0:
            raise ValueError("spares must be 0 (none) or more")
        if self.steps < 0:
            raise ValueError("steps must be 0 (endless) or more")
        d = self.detection
        if not 0 < d.heartbeat_interval_s < d.suspect_after_s <= d.evict_after_s:
            raise ValueError("heartbeat interval < suspect-after <= evict-after is required, all above 0")

    def lab(self) -> JobConfig:
        """The same job with the lab's quick detection."""
        return replace(self, detection=LAB_DETECTION)

    def shown(self) -> dict[str, float]:
        """Settings for `status`."""
        shown = {f.name: float(getattr(self, f.name)) for f in fields(self) if f.name not in {"job", "detection"}}
        shown.update({f.name: float(getattr(self.detection, f.name)) for f in fields(self.detection)})
        return shown
