"""What an incident cost, worked out from journals that are written by hand: the arithmetic a person can check."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ftctl.lab import analysis
from ftctl.lab.analysis import NotEnough
from ftctl.lab.demo_judge import Mark, judge
from ftctl.lab.demo_report import LIMITS_MS, Incident, Report
from ftctl.lab.demo_run import assess
from ftctl.lab.journal import Journals, parse

STEP_S = 0.2
WAIT_S = 0.010  # from the last gradient to the commit, when nothing is wrong
ALL = ("r0", "r1", "r2")


class Job:
    """Writes the journals of a job that commits a step every 200 ms, with exceptions as the test wants them."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.step = 0
        self.lines: dict[str, list[bytes]] = {name: [] for name in ALL}

    def write(self, replica: str, **fields: object) -> None:
        self.lines[replica].append(json.dumps({"mono": self.now, "time": self.now, **fields}).encode())

    def commit(
        self, members: tuple[str, ...] = ALL, *, stall_s: float = 0.0, retries: int = 0, slow_s: float = 0.0
    ) -> None:
        self.step += 1
        self.now += STEP_S - WAIT_S + slow_s
        produced = self.now
        self.now += WAIT_S + stall_s
        for index, name in enumerate(members):
            # Members do not produce and hear at the same instant: the last of each counts.
            self.write(
                name,
                kind="step",
                step=self.step,
                epoch=1,
                contributors=list(members),
                retries=retries,
                t_produced=produced - 0.02 * index,
                t_commit=self.now - 0.001 * index,
                loss=5.0 - 0.01 * self.step,
            )

    def commits(self, count: int, members: tuple[str, ...] = ALL) -> None:
        for _ in range(count):
            self.commit(members)

    def end(self, replica: str, parameters: str = "abc") -> None:
        self.write(
            replica, kind="end", step=self.step, exit_code=0, params_digest=parameters, optimizer_digest=parameters
        )

    def journals(self) -> Journals:
        return Journals({name: parse(name, lines) for name, lines in self.lines.items()})


def test_stall_is_the_wait_beyond_what_is_usual() -> None:
    job = Job()
    job.commits(25)
    down = job.now + 0.05
    job.commit(stall_s=0.130)
    job.commits(3)
    steps = analysis.steps_of(job.journals(), ALL)
    calm = analysis.calm_before(steps, down)
    assert calm.wait_s == pytest.approx(WAIT_S)
    assert calm.length_s == pytest.approx(STEP_S)
    assert calm.steps == 20
    worst = analysis.worst_stall(steps, calm, down, job.now)
    assert (worst.excess_ms, worst.step) == (pytest.approx(130), 26)


def test_a_slow_forward_pass_is_no_stall_but_a_longer_step() -> None:
    job = Job()
    job.commits(25)
    start = job.now
    job.commit(slow_s=0.3)
    steps = analysis.steps_of(job.journals(), ALL)
    calm = analysis.calm_before(steps, start)
    assert analysis.worst_stall(steps, calm, start, job.now).excess_ms == pytest.approx(0, abs=0.01)
    assert analysis.longest_step(steps, calm, start, job.now).excess_ms == pytest.approx(300)


def test_a_step_that_was_ready_before_the_window_and_one_after_it_do_not_count() -> None:
    job = Job()
    job.commits(10)
    job.commit(stall_s=0.5)
    start = job.now + 0.01
    job.commits(2)
    end = job.now
    job.commit(stall_s=0.7)
    steps = analysis.steps_of(job.journals(), ALL)
    calm = analysis.calm_before(steps, start)
    assert analysis.worst_stall(steps, calm, start, end).excess_ms == pytest.approx(0, abs=0.01)


def test_without_enough_calm_steps_nothing_is_claimed() -> None:
    job = Job()
    job.commits(5)
    with pytest.raises(NotEnough, match="only 4 calm steps"):
        analysis.calm_before(analysis.steps_of(job.journals(), ALL), job.now + 1)


def test_retried_and_changed_memberships_are_not_calm() -> None:
    job = Job()
    job.commits(7)
    job.commit(("r0", "r1"), stall_s=0.4, retries=1)
    job.commits(3, ("r0", "r1"))
    steps = analysis.steps_of(job.journals(), ("r0", "r1"))
    # Steps 2 to 7, and 10 and 11: the retried step and its follower are left out.
    assert analysis.calm_before(steps, job.now + 1).steps == 8


def test_a_torn_line_of_a_killed_process_is_skipped() -> None:
    job = Job()
    job.commits(6)
    job.lines["r2"][-1] = job.lines["r2"][-1][:30]
    journals = job.journals()
    assert journals["r2"].torn == 1
    assert len(analysis.step_lines(journals, "r2")) == 5


def test_lost_steps_are_those_done_twice_or_never_committed() -> None:
    job = Job()
    job.commits(10)
    whole = job.journals()
    assert analysis.steps_lost(whole, ALL, 0, job.now) == 0
    del job.lines["r1"][4]
    assert analysis.steps_lost(job.journals(), ALL, 0, job.now) == 1
    job.lines["r1"].append(job.lines["r1"][-1])
    assert analysis.steps_lost(job.journals(), ("r1",), 0, job.now) == 2


def test_steps_that_others_committed_without_it_are_not_lost_to_who_replays_them() -> None:
    job = Job()
    job.commits(4)
    job.commits(3, ("r0", "r1"))
    job.commits(4)
    assert analysis.steps_lost(job.journals(), ALL, 0, job.now) == 0
    del job.lines["r2"][5]
    assert analysis.steps_lost(job.journals(), ALL, 0, job.now) == 1, "and of its own all are asked for"


def played() -> tuple[Job, list[Mark]]:
    """A whole demo that goes well: every stall within its limit."""
    job = Job()
    marks = []
    job.commits(25)
    down = job.now + 0.1
    job.now += 0.003
    job.write("r1", kind="rail", rail="rail0", state="DOWN", active=False, t_event=down + 0.004)
    job.commit(stall_s=0.015)
    job.commits(8)
    up = job.now
    marks.append(Mark("rail-down", "node1/rail0", "r1", down, up, rail="rail0", watchers=ALL))
    job.commits(5)
    job.write("r1", kind="rail", rail="rail0", state="UP", active=True, t_event=job.now)
    back = job.now
    job.commits(5)
    marks.append(Mark("rail-up", "node1/rail0", "r1", up, job.now, rail="rail0", watchers=ALL))
    assert back - up == pytest.approx(1.0)
    killed = job.now + 0.1
    job.now += 0.12
    for survivor in ("r0", "r1"):
        job.write(survivor, kind="epoch", epoch=2, contributors=["r0", "r1"], retry=True)
    job.now -= 0.12
    job.commit(("r0", "r1"), stall_s=0.06, retries=1)
    job.commits(4, ("r0", "r1"))
    job.write("r2", kind="start", incarnation=4)
    born = job.now
    job.commits(6, ("r0", "r1"))
    job.commit(slow_s=0.05)
    contributes = job.now
    job.commits(5)
    marks.append(Mark("replica-killed", "r2", "r2", killed, job.now))
    marks.append(Mark("replica-rejoined", "r2", "r2", born, job.now))
    assert contributes > born
    asked = job.now
    job.commit()
    job.write("r1", kind="end", step=job.step, exit_code=76, params_digest="x", optimizer_digest="x")
    job.commits(5, ("r0", "r2"))
    marks.append(Mark("replica-drained", "r1", "r1", asked, job.now))
    asked = job.now
    job.commits(4, ("r0", "r2"))
    job.write("r1", kind="start", incarnation=5)
    job.commits(6, ("r0", "r2"))
    job.commits(5)
    marks.append(Mark("replica-rejoined", "r1", "r1", asked, job.now))
    for name in ALL:
        job.end(name)
    return job, marks


def test_a_demo_that_goes_well_passes_and_says_what_each_incident_cost() -> None:
    job, marks = played()
    report = assess(job.journals(), marks, list(ALL), [])
    assert report.failures() == []
    assert report.passed
    down, up, killed, rejoined, drained, again = report.incidents
    assert down.detect_ms == pytest.approx(4)
    assert down.stall_ms == pytest.approx(15)
    assert up.recover_s == pytest.approx(1.0)
    assert killed.detect_ms == pytest.approx(20)
    assert (killed.stall_ms, killed.steps_retried, killed.steps_lost) == (pytest.approx(60), 1, 0)
    assert rejoined.stall_ms == pytest.approx(50)
    assert rejoined.recover_s == pytest.approx(7 * STEP_S + 0.05, abs=0.01)
    assert drained.recover_s == pytest.approx(STEP_S, abs=0.01)
    assert drained.steps_retried == 0
    assert again.recover_s == pytest.approx(11 * STEP_S, abs=0.01)
    document = report.document()
    assert document["schema"] == 1
    assert document["passed"] is True
    assert [incident["kind"] for incident in document["incidents"]] == [  # type: ignore[index,union-attr]
        "rail-down",
        "rail-up",
        "replica-killed",
        "replica-rejoined",
        "replica-drained",
        "replica-rejoined",
    ]
    assert json.loads(json.dumps(document)) == document
    assert set(document) >= {"steps", "loss_first", "loss_last", "parameters_identical", "left_behind"}


@pytest.mark.parametrize(("kind", "limit"), LIMITS_MS.items())
def test_a_stall_beyond_its_limit_fails(kind: str, limit: float) -> None:
    within = Incident(kind, "x", None, limit, 0, 1.0)
    beyond = Incident(kind, "x", None, limit + 1, 0, 1.0)
    assert within.failures() == []
    assert f"(limit {limit:.0f})" in beyond.failures()[0]


def test_links_that_know_before_the_witness_have_noticed_at_once() -> None:
    job, marks = played()
    late = replace(marks[0], start=marks[0].start + 0.02)
    job.write("r0", kind="rail", rail="rail0", state="DOWN", active=False, t_event=late.start + 5.5)
    incidents, _ = judge(job.journals(), [late], ALL)
    assert incidents[0].detect_ms == 0.0


def test_a_drain_that_repeats_a_step_fails() -> None:
    assert Incident("replica-drained", "r1", None, 0.0, 0, 1.0, steps_retried=1).failures()
    assert not Incident("replica-killed", "r1", None, 0.0, 0, 1.0, steps_retried=1).failures()


def test_what_cannot_be_measured_does_not_pass() -> None:
    job, _ = played()
    for name in ALL:
        job.lines[name] = [line for line in job.lines[name] if b'"step": 26' not in line]
    early = Mark("rail-down", "node1/rail0", "r1", 1000.3, 1000.5, rail="rail0", watchers=ALL)
    incidents, problems = judge(job.journals(), [early], ALL)
    assert incidents[0].stall_ms is None
    assert problems
    assert not Report(incidents=incidents, problems=problems).passed


def test_other_parameters_other_last_steps_or_a_missing_end_do_not_pass() -> None:
    job, marks = played()
    for spoil in (
        lambda: job.end("r2", "other"),
        lambda: job.write("r2", kind="start", incarnation=9),
        lambda: job.write("r2", kind="end", step=1, exit_code=0, params_digest="abc", optimizer_digest="abc"),
    ):
        kept = list(job.lines["r2"])
        spoil()
        report = assess(job.journals(), marks, list(ALL), [])
        assert not report.parameters_identical
        assert "the replicas did not end with identical parameters" in report.failures()
        job.lines["r2"] = kept
    assert assess(job.journals(), marks, list(ALL), []).passed


def test_leftovers_and_a_loss_that_does_not_fall_fail() -> None:
    job, marks = played()
    report = assess(job.journals(), marks, list(ALL), [])
    report.left_behind = ["process 1 (sleep)"]
    assert report.failures() == ["left behind: process 1 (sleep)"]
    report.left_behind = []
    report.loss_last = report.loss_first
    assert not report.passed
