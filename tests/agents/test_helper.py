"""The helper as root, asked by a user without rights: what it does, what it refuses, and that every fault ends."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_network import Namespace, add_rail, add_routes, needs_root, settled
from live_agent import until, write
from live_helper import AGENT_UID, STRANGER_UID, LiveHelper, as_user, live_helper
from pyroute2 import IPRoute

from agents.api.audit import AuditRecord
from agents.helper import wire
from agents.helper.client import HelperGone
from agents.helper.server import HelperServer
from agents.helper.settings import HelperProblem, load, uid_of
from agents.host.processes import start_time_of
from agents.host.workers import Worker

pytestmark = [pytest.mark.root, needs_root, pytest.mark.timeout(400)]


@dataclass
class Node:
    helper: LiveHelper
    ipr: IPRoute
    rail0: int

    def up(self) -> bool:
        return bool(self.ipr.get_links(self.rail0)[0]["flags"] & 1)


@pytest.fixture
def node() -> Iterator[Node]:
    """Two rails, a third device that is no rail, and a management NIC."""
    namespace = Namespace()
    try:
        with namespace.entered(), IPRoute() as ipr:
            ipr.link("set", index=1, state="up")
            rail0 = add_rail(ipr, "rail0", 0)
            for number, name in enumerate(("rail1", "other0", "mgmt0"), 1):
                add_rail(ipr, name, number)
            add_routes(ipr, rail0, 0)
            settled(ipr, rail0)
            with live_helper(rails=["rail0", "rail1"], management_nic="mgmt0", max_duration_s=60.0) as helper:
                yield Node(helper, ipr, rail0)
    finally:
        namespace.close()


def wish(**given: Any) -> wire.Inject:
    return wire.Inject(**{"kind": "link-down", "owner": "ann", "duration_s": 30.0, "nic": "rail0", **given})


def made(reply: wire.AnyReply) -> wire.Fault:
    assert isinstance(reply, wire.One), reply
    return reply.fault


def refused(reply: wire.AnyReply) -> wire.Refused:
    assert isinstance(reply, wire.Refused), reply
    return reply


def test_a_link_goes_down_for_a_user_without_rights_and_comes_back_whole(node: Node) -> None:
    before = settled(node.ipr, node.rail0)
    helper = node.helper.start()
    fault = made(helper.ask(wish(request_id="r1")))
    assert not node.up()
    assert fault.entry.state.value == "active"
    assert fault.by_hand
    assert made(helper.ask(wish(request_id="r1"))).entry.id == fault.entry.id, "asked twice, made once"
    back = made(helper.ask(wire.Revert(fault.entry.id, "by ann")))
    assert back.entry.state.value == "reverted"
    assert settled(node.ipr, node.rail0) == before

    rights = Path(f"/proc/{helper.pid}/status").read_text()
    kept = 1 << 12 | 1 << 5  # CAP_NET_ADMIN, CAP_KILL
    for line in rights.splitlines():
        if line.startswith(("CapEff:", "CapPrm:", "CapBnd:")):
            assert int(line.split()[1], 16) == kept, line
    assert "NoNewPrivs:\t1" in rights
    watchdog = Path(f"/proc/{helper.watchdogs()[0]}/status").read_text()
    assert f"CapEff:\t{kept:016x}" in watchdog
    assert helper.stop() == 0
    assert helper.watchdogs() == []


def test_what_the_agent_may_not_have_is_refused_though_it_asks(node: Node) -> None:
    node.helper.start()
    with subprocess.Popen(["/bin/sleep", "60"], cwd="/") as sleeper:  # of root
        try:
            _refusals(node, Worker("r0", 0, sleeper.pid, start_time_of(sleeper.pid) or 0))
            assert sleeper.poll() is None
        finally:
            sleeper.kill()


def _refusals(node: Node, roots: Worker) -> None:
    helper = node.helper
    for asked, code, words in (
        (wish(nic="mgmt0", allow_last_rail=True), "refused", "management NIC"),
        (wish(nic="other0"), "refused", "not declared as a rail"),
        (wish(nic="eth9"), "unknown-nic", "no network device eth9"),
        (wish(duration_s=61.0), "bad-duration", "too long"),
        (wish(duration_s=float("nan")), "bad-duration", "not above 0"),
        (wish(dead_man_s=1e9), "bad-duration", "dead_man_s"),
        (wish(kind="rm-rf"), "unknown-kind", "rm-rf"),
        (wish(kind="agent-kill", nic=""), "unknown-kind", "agent-kill"),
        (wish(params={"x": 1}), "bad-request", "no parameter x"),
        (wish(kind="proc-kill", nic="", replica="r0", workers=(roots,), allow_last_replica=True), "refused", "user 0"),
        (wish(kind="node-down", nic="", workers=(roots,), allow_last_replica=True), "refused", "user 0"),
        (wish(kind="coordinator-kill", nic="", coordinator=roots), "refused", "user 0"),
        (
            wish(kind="proc-hang", nic="", replica="r0", workers=(Worker("r0", 0, 1, start_time_of(1) or 0),)),
            "refused",
            "process 1 is not one",
        ),
    ):
        answer = refused(helper.ask(asked))
        assert answer.code == code, answer
        assert words in f"{answer.thing}: {answer.reason}", answer
    assert helper.faults() == {}
    assert node.up()
    entry = made(helper.ask(wish()))
    assert "is on rail0 already" in refused(helper.ask(wish(kind="link-loss", params={"percent": 1.0}))).reason
    assert refused(helper.ask(wire.Revert("f-00000000", "x"))).code == "unknown-fault"
    assert "last healthy rail" in refused(helper.ask(wish(nic="rail1"))).reason
    others = tuple(wire.Elsewhere(f"f-{number}", "noop") for number in range(3))
    answer = refused(helper.ask(wish(nic="rail1", allow_last_rail=True, elsewhere=others)))
    assert "4 faults are in force" in answer.reason, answer
    assert made(helper.ask(wire.Revert(entry.entry.id, "x"))).entry.state.value == "reverted"


def test_a_process_of_the_agents_user_is_stopped_and_goes_on(node: Node) -> None:
    node.helper.settings["registered_only"] = False
    helper = node.helper.start()
    with subprocess.Popen(["/bin/sleep", "60"], user=AGENT_UID, cwd="/") as sleeper:
        try:
            worker = Worker("r0", 0, sleeper.pid, start_time_of(sleeper.pid) or 0)
            fault = made(
                helper.ask(wish(kind="proc-hang", nic="", replica="r0", workers=(worker,), allow_last_replica=True))
            )
            assert letter(sleeper.pid) == "T"
            made(helper.ask(wire.Revert(fault.entry.id, "by ann")))
            assert letter(sleeper.pid) != "T"
        finally:
            sleeper.kill()


def test_a_process_outside_of_the_control_groups_that_root_named_is_not_touched() -> None:
    with subprocess.Popen(["/bin/sleep", "60"], user=AGENT_UID, cwd="/") as sleeper:
        try:
            worker = Worker("r0", 0, sleeper.pid, start_time_of(sleeper.pid) or 0)
            hang = wish(kind="proc-hang", nic="", replica="r0", workers=(worker,), allow_last_replica=True)
            own = Path(f"/proc/{sleeper.pid}/cgroup").read_text().splitlines()[0].split(":", 2)[2]
            for patterns, allowed in (([f"{own}*"], True), (["/ftctl-replicas.slice/*", "/nowhere"], False)):
                with live_helper(process_cgroups=patterns, registered_only=False) as helper:
                    helper.start()
                    answer = helper.ask(hang)
                    if allowed:
                        made(answer)
                        assert letter(sleeper.pid) == "T"
                        assert helper.stop() == 0
                    else:
                        words = "only processes in /ftctl-replicas.slice/*, /nowhere may be faulted"
                        assert words in refused(answer).reason
                    assert letter(sleeper.pid) != "T"
        finally:
            sleeper.kill()


def test_only_a_process_that_came_to_the_agent_by_itself_is_taken_for_a_rank() -> None:
    """It holds a connection to the agent, of which the agent can show its own end, and to which it cannot be forced."""
    where = tempfile.mkdtemp(prefix="ft-ranks-")
    path = Path(where) / "r"
    os.chmod(where, 0o755)
    code = f"import socket, time; s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r}); time.sleep(60)"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o666)
    listener.listen(4)
    rank = subprocess.Popen(["/usr/bin/env", "python3", "-c", code], user=AGENT_UID, cwd="/")
    daemon = Path(where) / "d"  # of somebody to whom the agent can connect
    code = (
        f"import socket, time; s = socket.socket(socket.AF_UNIX); s.bind({str(daemon)!r}); s.listen(); time.sleep(60)"
    )
    os.chown(where, AGENT_UID, AGENT_UID)
    other = subprocess.Popen(["/usr/bin/env", "python3", "-c", code], user=AGENT_UID, cwd="/")
    client = socket.socket(socket.AF_UNIX)
    ours, theirs = socket.socketpair()
    try:
        accepted, _ = listener.accept()
        until(lambda: start_time_of(rank.pid) is not None, "it runs")
        with live_helper() as helper:
            helper.start()

            def hang(process: subprocess.Popen[bytes], *proofs: int) -> wire.AnyReply:
                worker = Worker("r0", 0, process.pid, start_time_of(process.pid) or 0)
                asked = wish(kind="proc-hang", nic="", replica="r0", workers=(worker,), allow_last_replica=True)
                return helper.ask(asked, proofs=proofs)

            words = "never registered with the agent"
            assert words in refused(hang(rank)).reason
            assert words in refused(hang(rank, ours.fileno(), 0, 1)).reason
            assert words in refused(hang(other, accepted.fileno())).reason
            until(lambda: client.connect_ex(str(daemon)) in (0, errno.EISCONN), "the daemon listens")
            assert words in refused(hang(other, client.fileno())).reason, (
                "the agent went there, and not it to the agent"
            )
            fault = made(hang(rank, ours.fileno(), accepted.fileno()))
            assert letter(rank.pid) == "T"
            made(helper.ask(wire.Revert(fault.entry.id, "by ann")))
            assert letter(rank.pid) != "T"
            before = len(os.listdir(f"/proc/{helper.pid}/fd"))
            for _ in range(3):
                refused(hang(other, *[accepted.fileno()] * 100))
            assert len(os.listdir(f"/proc/{helper.pid}/fd")) <= before + 1, "what came along is closed again"
            rank.kill()
            rank.wait()
            assert words in refused(hang(other, accepted.fileno())).reason
            accepted.close()
    finally:
        for process in (rank, other):
            process.kill()
            process.wait()
        for sock in (ours, theirs, listener, client):
            sock.close()
        shutil.rmtree(where)


def test_the_helper_writes_down_what_it_was_asked_and_by_whom(node: Node) -> None:
    helper = node.helper.start()
    fault = made(helper.ask(wish(reason="drill\nof the week")))
    refused(helper.ask(wish(nic="mgmt0", reason="try")))
    helper.ask(wire.Look())
    made(helper.ask(wire.Revert(fault.entry.id, "by ann")))
    helper.socket.chmod(0o666)
    refused(helper.ask(wire.Look(), uid=STRANGER_UID))
    path = helper.state / "audit.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    until(lambda: len(path.read_text().splitlines()) >= 4, "the stranger is written down")
    inject, turned, revert, stranger = (AuditRecord.model_validate_json(line) for line in path.read_text().splitlines())
    assert (inject.action, inject.target, inject.who, inject.why) == ("inject", "rail0", "ann", "drill of the week")
    assert inject.source.endswith(f"of user {AGENT_UID}")
    assert (inject.result, inject.detail) == ("ok", f"{fault.entry.id} active")
    assert inject.asks == {"kind": "link-down", "duration_s": 30.0}
    assert (turned.result, turned.why) == ("refused", "try")
    assert "management NIC" in turned.detail
    assert (revert.action, revert.target, revert.detail) == ("revert", fault.entry.id, f"{fault.entry.id} reverted")
    assert (stranger.action, stranger.result) == ("connect", "refused")
    assert f"user {STRANGER_UID}" in stranger.source


def letter(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_strangers_and_garbage_are_turned_away_and_cost_nothing(node: Node) -> None:
    helper = node.helper.start()
    assert stat.S_IMODE(helper.socket.stat().st_mode) == 0o600
    with pytest.raises(HelperGone, match="does not let this user in"):
        helper.ask(wire.Look(), uid=STRANGER_UID)
    helper.socket.chmod(0o666)  # the file's mode is not the only thing in the way
    assert f"user {STRANGER_UID} is not heard" in refused(helper.ask(wish(), uid=STRANGER_UID)).reason
    assert "user 0 is not heard" in refused(helper.ask(wish(), uid=0)).reason

    for junk in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff" + b"x" * 64,
        framed({"version": wire.VERSION, "request": {"type": "Inject", "kind": "link-down"}}),
        framed({"version": wire.VERSION, "request": {"type": "Revert", "name": "f", "why": "w", "undo": "x"}}),
        framed({"version": wire.VERSION, "request": {"type": "Revert", "name": "f" * 65, "why": "w"}}),
        framed({"version": wire.VERSION, "request": {"type": "Exec", "command": "id"}}),
        framed({"version": wire.VERSION + 1, "request": {"type": "Abilities"}}),
        framed(["x"] * 10_000),
        b"\x04\0\0\0\xdd\xff\xff\xff",
    ):
        answer = wire.reply.decode(as_user(AGENT_UID, sender(helper.socket, junk))[4:])
        assert refused(answer).code == "bad-request", (junk[:40], answer)
    silent = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    try:
        for one in silent:
            one.connect(str(helper.socket))  # root: turned away at once, whatever it does not say
        assert isinstance(helper.ask(wire.Abilities()), wire.Able)
    finally:
        for one in silent:
            one.close()
    assert helper.faults() == {}
    assert not helper.ended()


def framed(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


def sender(path: Path, data: bytes) -> Callable[[], bytes]:
    def work() -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(20)
            sock.connect(str(path))
            sock.sendall(data)
            answer = b""
            while piece := sock.recv(65536):
                answer += piece
            return answer

    return work


def test_a_killed_helper_leaves_a_watchdog_and_the_next_one_takes_back_at_once(node: Node) -> None:
    before = settled(node.ipr, node.rail0)
    helper = node.helper.start()
    made(helper.ask(wish(duration_s=2.0)))
    helper.kill()
    until(node.up, "the helper's watchdog sets the link up")
    assert settled(node.ipr, node.rail0) == before
    until(lambda: helper.watchdogs() == [], "the watchdog ends when nothing is left")

    fault = made(helper.start().ask(wish()))
    watchdogs = helper.watchdogs()
    helper.kill()
    for pid in watchdogs:
        os.kill(pid, signal.SIGKILL)
    assert not node.up()
    helper.start()
    assert node.up()
    assert helper.faults()[fault.entry.id] == "reverted"
    assert "the helper was started anew" in helper.text()


def test_a_fault_ends_in_time_whatever_becomes_of_the_one_who_asked(node: Node) -> None:
    helper = node.helper.start()
    fault = made(helper.ask(wish(duration_s=1.0)))  # its asker, a child process, has ended already
    until(node.up, "the fault's time is up")
    until(lambda: helper.faults()[fault.entry.id] == "reverted", "it says so")
    silent = made(helper.ask(wish(duration_s=50.0, dead_man_s=1.0)))
    until(node.up, "its controller is silent")
    until(lambda: helper.faults()[silent.entry.id] == "reverted", "it says so")


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv (util-linux) is not here")
def test_the_rights_of_its_unit_are_enough_and_a_killed_ones_socket_is_not_in_the_way(node: Node) -> None:
    capabilities = "-all,+net_admin,+kill,+chown,+setpcap"
    through = ("setpriv", f"--bounding-set={capabilities}", "--no-new-privs")
    node.helper.start(through=through).kill()
    assert node.helper.socket.exists()
    helper = node.helper.start(through=through)
    rights = Path(f"/proc/{helper.pid}/status").read_text()
    assert f"CapEff:\t{1 << 12 | 1 << 5:016x}" in rights
    other = LiveHelper(helper.root, **{**helper.settings, "state_dir": str(helper.root / "other")})
    other.config = helper.root / "other.yaml"
    try:
        other.start(wait=False)
        until(other.ended, "a second helper on the same socket ends")
        assert "another process listens there" in other.text()
    finally:
        other.close()
    fault = made(helper.ask(wish()))
    assert not node.up(), "the first one is still heard"
    made(helper.ask(wire.Revert(fault.entry.id, "by ann")))
    assert node.up()


def test_no_more_begin_in_a_minute_than_may(node: Node) -> None:
    node.helper.settings["max_per_minute"] = 2
    helper = node.helper.start()
    for _ in range(2):
        helper.ask(wire.Revert(made(helper.ask(wish())).entry.id, "x"))
    assert "max_per_minute" in refused(helper.ask(wish())).reason
    assert node.up()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"colour": "red"}, "colour"),
        ({"rails": ["mgmt0"], "management_nic": "mgmt0"}, "as a rail and as the management NIC"),
        ({"agent_user": "nobody-here"}, "no user nobody-here"),
        ({"max_duration_s": 1e9}, "max_duration_s"),
        ({"rails": ["a/b"]}, "rails"),
        ({"socket": "run.sock"}, "socket"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_said_in_one_line(change: dict[str, Any], words: str) -> None:
    with live_helper(**change) as helper:
        write(helper.config, helper.settings)
        with pytest.raises(HelperProblem) as caught:
            uid_of(load(helper.config).agent_user)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_configuration_that_others_can_write_is_not_roots_word() -> None:
    with live_helper() as helper:
        write(helper.config, helper.settings)
        assert load(helper.config).agent_user == AGENT_UID
        helper.config.chmod(0o666)
        with pytest.raises(HelperProblem, match="can be written by others than root"):
            load(helper.config)
        helper.config.chmod(0o600)
        os.chown(helper.root, AGENT_UID, -1)
        with pytest.raises(HelperProblem, match="belongs to user"):
            load(helper.config)
        helper.start(wait=False)
        until(helper.ended, "it ends")
        assert helper.process is not None
        assert helper.process.returncode == 2
        assert len(helper.text().splitlines()) == 1, helper.text()


def test_a_directory_that_was_there_keeps_its_mode() -> None:
    with tempfile.TemporaryDirectory() as there:
        os.chmod(there, 0o711)
        new = Path(there) / "new" / "helper.sock"
        for path in (Path(there) / "helper.sock", new):
            server = HelperServer(path, os.geteuid())
            server.open()
            server.close()
        assert stat.S_IMODE(os.stat(there).st_mode) == 0o711
        assert stat.S_IMODE(new.parent.stat().st_mode) == 0o755
