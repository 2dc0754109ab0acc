"""Durations, hostlists, exit codes and the judgement of problems: decided without a clock or a socket."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from agents.api import models as m
from agents.api.cordon import CordonView
from ftctl import durations, hostlist
from ftctl.client.cluster import NodeAnswer, Snapshot, short_name
from ftctl.client.problems import Problem, Urgency, find, recommend, verdict
from ftctl.errors import AgentUnreachable, CliError, UsageProblem
from ftctl.exit_codes import ExitCode, most_urgent
from ftctl.render.tables import Items, table
from ftctl.render.tables import show as show_parts

from .fake_agent import FakeAgent, FakeCluster, nic
from .fake_job import FakeJob, replica

# --- durations -------------------------------------------------------------------------------------------------------

UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


@given(st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(sorted(UNITS))), min_size=1, max_size=4))
def test_a_duration_is_the_sum_of_its_parts(parts: list[tuple[int, str]]) -> None:
    text = "".join(f"{number}{unit}" for number, unit in parts)
    assert durations.parse(text) == pytest.approx(sum(number * UNITS[unit] for number, unit in parts))


@given(st.floats(0, 10 * 86400))
def test_what_is_shown_can_be_read_back_and_is_near(seconds: float) -> None:
    # Two units are shown, so what is lost is at most one of the smaller unit.
    assert durations.parse(durations.show(seconds)) == pytest.approx(seconds, rel=0.042, abs=0.06)


@given(st.text(max_size=30))
def test_any_text_is_a_duration_or_a_clear_error(text: str) -> None:
    try:
        seconds = durations.parse(text)
    except durations.DurationError:
        return
    assert seconds >= 0


@pytest.mark.parametrize(
    "text", ["", "20", "-5s", "5 s", "1e3s", "s", "5S", "٣s", "nan", "inf", "5s5", "1" * 100 + "s"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(durations.DurationError):
        durations.parse(text)


# --- hostlists -------------------------------------------------------------------------------------------------------


def test_hostlists_as_operators_write_them() -> None:
    assert hostlist.expand("node[0-3,7]") == ["node0", "node1", "node2", "node3", "node7"]
    assert hostlist.expand("n[08-11],x") == ["n08", "n09", "n10", "n11", "x"]
    assert hostlist.expand("r[0-1]n[0-1]") == ["r0n0", "r0n1", "r1n0", "r1n1"]
    assert hostlist.expand("a b,a") == ["a", "b"]


@given(st.lists(st.integers(0, 500), min_size=1, max_size=20, unique=True))
def test_a_list_of_numbers_expands_to_itself(numbers: list[int]) -> None:
    assert hostlist.expand(f"node[{','.join(map(str, numbers))}]") == [f"node{number}" for number in numbers]


@pytest.mark.parametrize(
    "text", ["", ",", "a[", "a]", "a[]", "a[1-]", "a[3-1]", "a[x]", "a[[1]]", "a[0-99999999]", "a[0-999]b[0-999]"]
)
def test_what_is_no_hostlist(text: str) -> None:
    with pytest.raises(hostlist.HostlistError):
        hostlist.expand(text)


@given(st.text(alphabet="ab01,-[] ", max_size=20))
def test_any_text_is_a_hostlist_or_an_error(text: str) -> None:
    try:
        names = hostlist.expand(text)
    except hostlist.HostlistError:
        return
    assert names
    assert len(set(names)) == len(names)


# --- exit codes ------------------------------------------------------------------------------------------------------


def test_the_most_urgent_code_wins() -> None:
    assert most_urgent([]) is ExitCode.OK
    order = [ExitCode.IN_FORCE, ExitCode.REFUSED, ExitCode.UNREACHABLE, ExitCode.FAILED]  # 5 > 7 > 6 > 1
    for index, code in enumerate(order):
        assert most_urgent(reversed(order[index:])) is code
    assert most_urgent(ExitCode) is ExitCode.IN_FORCE


def test_every_error_code_of_the_agents_has_an_exit_code() -> None:
    for status, code in m.ERROR_CODES.values():
        assert ExitCode(code)
        assert 400 <= status < 600


# --- problems --------------------------------------------------------------------------------------------------------


@pytest.fixture
def healthy(tmp_path_factory: pytest.TempPathFactory) -> FakeCluster:
    return FakeCluster(tmp_path_factory.mktemp("c"))


def snapshot(cluster: FakeCluster, **errors: CliError) -> Snapshot:
    def answer(agent: FakeAgent) -> NodeAnswer:
        error = errors.get(agent.name)
        return NodeAnswer(agent.name, None if error else agent.view(), error)

    job_error = errors.get("job")
    job = cluster.job.view() if cluster.job and not job_error else None
    now = max([0.0, *(r.since for r in job.replicas)]) + 5 if job else 0.0
    return Snapshot(now, "main", tuple(map(answer, cluster.agents.values())), job, job_error)


def job_of(cluster: FakeCluster) -> FakeJob:
    assert cluster.job is not None
    return cluster.job


def test_a_healthy_cluster_has_no_problems(healthy: FakeCluster) -> None:
    assert find(snapshot(healthy)) == []
    assert verdict([]) is ExitCode.OK


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"present": False}, "missing"),
        ({"up": False, "carrier": False}, "down"),
        ({"carrier": False}, "no carrier"),
        ({"state": m.Health.DEGRADED, "reason": "12 errors a second"}, "degraded"),
    ],
)
def test_a_bad_rail_is_a_problem_with_something_to_do(
    healthy: FakeCluster, change: dict[str, object], word: str
) -> None:
    healthy["node1"].nics = [nic("rail0", **change), nic("rail1"), nic("eth0", role="mgmt", carrier=False)]
    (problem,) = find(snapshot(healthy))
    assert problem.object == "node1/rail0"
    assert problem.reason.startswith(word)
    assert problem.action
    assert verdict([problem]) is ExitCode.FAILED


def test_a_rail_that_is_down_by_a_fault_is_expected(healthy: FakeCluster) -> None:
    agent = healthy["node1"]
    agent._inject(m.InjectRequest(kind="link-down", nic="rail0", duration_s=20))
    (problem,) = find(snapshot(healthy))
    assert problem.expected
    assert "f-node1-0" in problem.action
    assert verdict([problem]) is ExitCode.OK


@pytest.mark.parametrize(
    ("state", "code", "action"),
    [
        ("starting", 0, "wait"),
        ("fetching", 0, "wait"),
        ("replaying", 0, "wait"),
        ("draining", 0, "wait"),
        ("drained", 0, "rejoin"),
        ("suspect", 1, "why"),
        ("hung", 1, "dump"),
        ("evicted", 1, "rejoin"),
        ("blocked", 1, "why"),
        ("unreachable", 1, "why"),
        ("a-state-of-a-later-version", 1, "why"),
    ],
)
def test_every_state_of_a_replica_has_a_next_step(healthy: FakeCluster, state: str, code: int, action: str) -> None:
    job_of(healthy).replicas["r1"] = replica("r1", "node1", state, reason="because")
    healthy["node1"].processes = []
    problems = [p for p in find(snapshot(healthy)) if p.object == "r1"]
    assert problems[0].action.startswith(f"ftctl {action} replica r1")
    assert "because" in problems[0].reason
    assert verdict(problems) == code


def test_contributing_and_spare_are_no_problems(healthy: FakeCluster) -> None:
    job_of(healthy).min_replicas = 1
    job_of(healthy).replicas["r1"] = replica("r1", "node1", "spare")
    assert find(snapshot(healthy)) == []


def test_spares_that_were_never_started_are_a_problem_and_a_returning_one_is_waited_for_as_such(
    healthy: FakeCluster,
) -> None:
    job = job_of(healthy)
    job.replicas_wanted, job.spares_wanted, job.min_replicas = len(job.replicas), 1, 1
    (problem,) = find(snapshot(healthy))
    assert problem.reason == "0 of 1 hot spares are ready: with the next losses fewer will contribute"
    job.replicas["r9"] = replica("r9", "node1", "fetching")
    (problem,) = find(snapshot(healthy))
    assert problem.action == "ftctl wait replica r9 --for spare"
    job.replicas["r9"] = replica("r9", "node1", "spare")
    assert find(snapshot(healthy)) == []


def test_an_evicted_replica_that_is_being_restarted_needs_no_hands(healthy: FakeCluster) -> None:
    job_of(healthy).replicas["r1"] = replica("r1", "node1", "evicted")
    healthy["node1"].processes = [m.ProcessView(replica="r1", rank=0, pid=None, state="backoff", next_start_s=1.0)]
    (problem,) = find(snapshot(healthy))
    assert problem.expected
    healthy["node1"].processes = [m.ProcessView(replica="r1", rank=0, pid=None, state="failed", exit_code=77)]
    (problem,) = find(snapshot(healthy))
    assert not problem.expected
    assert "exit code 77" in problem.reason


def test_below_min_replicas_the_job_itself_is_the_problem(healthy: FakeCluster) -> None:
    job = job_of(healthy)
    job.state, job.reason = "holding", "1 of at least 2 contributors"
    job.set("r1", "drained")
    job.set("r2", "drained")
    problems = find(snapshot(healthy))
    assert problems[0].object == "job main"
    assert "1 of at least 2" in problems[0].reason
    assert recommend(problems) == problems[0]
    assert problems[0].action == "ftctl rejoin replica r1"


def test_several_injected_faults_are_taken_back_by_one_command() -> None:
    def fault(number: int) -> Problem:
        return Problem(f"node0/rail{number}", "DOWN: injected", f"ftctl revert f{number}", Urgency.EXPECTED)

    assert recommend([fault(0)]) == fault(0)
    both = recommend([fault(0), fault(1)])
    assert both is not None
    assert (both.action, both.object) == ("ftctl revert --all", "node0/rail0, node0/rail1")
    lost = Problem("r1", "lost", "ftctl rejoin replica r1", Urgency.REPLICA)
    assert recommend([lost, fault(0), fault(1)]) == lost


def test_a_job_that_trains_with_a_trouble_is_not_healthy(healthy: FakeCluster) -> None:
    """The disk of the coordinator's record is full: nothing is lost yet, and the operator must hear of it now."""
    job = job_of(healthy)
    job.reason = "the record cannot be written: record.json: No space left on device (look at: df -h /store)"
    (problem,) = find(snapshot(healthy))
    assert (problem.object, problem.reason, problem.expected) == ("job main", job.reason, False)
    assert problem.action


def test_a_finished_job_does_not_miss_its_replicas(healthy: FakeCluster) -> None:
    job = job_of(healthy)
    job.state = "finished"
    for name in job.replicas:
        job.set(name, "unreachable")
    assert find(snapshot(healthy)) == []


def test_a_dead_coordinator_and_a_dead_agent_are_different_things(healthy: FakeCluster) -> None:
    dead = AgentUnreachable("node2", "nobody listens")
    problems = find(snapshot(healthy, node2=dead, job=CliError("job main", "connection refused")))
    assert [p.object for p in problems] == ["coordinator", "node2"]
    assert verdict(problems) is ExitCode.UNREACHABLE
    everything_dead = find(snapshot(healthy, node0=dead, node1=dead, node2=dead, job=dead))
    assert [p.object for p in everything_dead] == ["node0", "node1", "node2"]


def test_what_an_agent_judged_fills_in_and_is_not_said_twice(healthy: FakeCluster) -> None:
    healthy["node0"].problems = [
        m.ProblemView(object="node0/gpu3", reason="Xid 79", action="reset it"),
        m.ProblemView(object="node0/rail0", reason="cable unplugged", action="plug it in"),
    ]
    healthy["node0"].nics = [nic("rail0", carrier=False)]
    problems = {p.object: p for p in find(snapshot(healthy))}
    assert problems["node0/gpu3"].action == "reset it"
    assert problems["node0/rail0"].action == "plug it in"
    assert len(problems) == 2


def lost_gpu(agent: FakeAgent, index: int = 0) -> None:
    gpu = m.GpuView(index=index, uuid="GPU-1", name="H100", state=m.Health.UNHEALTHY, reason="GPU is lost")
    agent.gpus = m.GpuSummary(devices=[gpu])


def test_a_lost_gpu_has_something_to_do_that_the_agent_or_its_policy_advises(healthy: FakeCluster) -> None:
    lost_gpu(healthy["node1"])
    (problem,) = find(snapshot(healthy))
    assert (problem.object, problem.action) == ("node1/gpu0", "ftctl health --explain")
    assert verdict([problem]) is ExitCode.FAILED
    text = "the policy recommends: evict r1 (GPU is lost)"
    healthy["node1"].problems = [m.ProblemView(object="node1/gpu0", reason=text, action="ftctl evict replica r1")]
    (problem,) = find(snapshot(healthy))
    assert (problem.reason, problem.action) == (f"H100: {text}", "ftctl evict replica r1")


def test_a_gpu_that_is_lost_on_purpose_is_expected(healthy: FakeCluster) -> None:
    lost_gpu(healthy["node1"])
    fault = healthy["node1"]._inject(m.InjectRequest(kind="gpu-lost", duration_s=20))
    healthy["node1"].faults = [fault.model_copy(update={"target": "node1/gpu0"})]
    (problem,) = find(snapshot(healthy))
    assert problem.expected
    assert problem.action == f"ftctl revert {fault.id}"


@pytest.mark.parametrize("state", ["evicted", "drained"])
@pytest.mark.parametrize("cordoned", [False, True])
def test_nobody_is_told_to_let_a_replica_in_beside_a_lost_gpu(healthy: FakeCluster, state: str, cordoned: bool) -> None:
    job_of(healthy).replicas["r1"] = replica("r1", "node1", state)
    healthy["node1"].processes = [m.ProcessView(replica="r1", rank=0, pid=None, state="stopped")]
    if cordoned:
        healthy["node1"].cordon = CordonView(by="policy-node1", reason="Xid 79", since=1.0)
    back = recommend(find(snapshot(healthy)))
    assert back is not None
    assert back.action.split()[1] in ("uncordon", "rejoin")
    lost_gpu(healthy["node1"])
    problems = find(snapshot(healthy))
    assert {problem.action for problem in problems} == {"ftctl health --explain"}
    assert any(problem.object == "r1" and "node1/gpu0 is unhealthy" in problem.reason for problem in problems)


def test_replica_names_short_and_in_full() -> None:
    assert short_name("r1", "main") == "r1"
    assert short_name("main/r1", "main") == "r1"
    for text in ("other/r1", "main/", ""):
        with pytest.raises(UsageProblem):
            short_name(text, "main")


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_cell_of_a_table_is_cut_however_narrow_the_terminal(width: int) -> None:
    heads = ["node", "process", "link", "rail", "up", "state", "since", "flaps", "resumes", "moved", "reason"]
    row = ["node12", "6410 nccl rank 0", "from node1", "rail0", "0/2", "PROBING", "2.5s", "1", "10", "36 MB"]
    reason = "trying a fresh connection after: the peer says: rail0 has no carrier"
    console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    show_parts(console, table("links", heads, [[*row, reason]]))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert all(len(line) <= width for line in shown.splitlines())
    words = shown.split()
    for text in (*(head.upper() for head in heads), *row, reason):
        assert all(word in words for word in text.split()), text


@pytest.mark.parametrize("width", [30, 60, 80, 200])
def test_a_line_ends_between_two_rails_and_not_inside_one(width: int) -> None:
    rails = ["rail0 up 10G 0/4 links, 2 moved", "rail1 up 10G active", "rail2 up 10G 4/4 links", "rail3 down"]
    console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    row = ("node0", "pid 17375, 22s", "no GPUs (NVML not found)", "-", Items(map(Text, rails)))
    show_parts(console, table("", ("node", "agent", "gpus", "faults", "rails"), [row]))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    whole = [rail for rail in rails if len(rail) <= width - 4]
    assert [rail for rail in whole if rail not in text] == []
    assert max(map(len, text.splitlines())) <= width
    if width >= 60:
        assert len(text.splitlines()) < 2 + len(rails)  # side by side where there is room
