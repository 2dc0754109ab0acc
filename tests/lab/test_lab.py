"""A lab's network, its keeper and its teardown; processes that sleep stand in for the coordinator and the agents."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ftctl.errors import CliError, UsageProblem
from ftctl.lab import lifecycle, namespaces
from ftctl.lab.layout import LabOptions
from ftctl.lab.lifecycle import Lab
from ftctl.lab.manifest import ChildState, KeeperState, ProcessSpec
from ftctl.lab.processes import processes_of
from ftctl.lab.registry import list_labs

from .conftest import eventually, machine, needs_namespaces, remains, sleepers

pytestmark = needs_namespaces


def all_running(lab: Lab) -> bool:
    state = lab.keeper()
    return state is not None and bool(state.children) and all(child.state == "running" for child in state.children)


def up(name: str = "lab", replicas: int = 2, rate: str = "") -> Lab:
    options = LabOptions(name=name, replicas=replicas, rate=rate)

    def ready(lab: Lab) -> None:
        eventually(lambda: all_running(lab), "not all processes of the lab started")

    return lifecycle.bring_up(options, ready, processes=sleepers)


def keeper_of(lab: Lab) -> KeeperState:
    state = lab.keeper()
    assert state is not None
    return state


def child_of(lab: Lab, name: str) -> ChildState:
    return next(child for child in keeper_of(lab).children if child.name == name)


def inside(lab: Lab, place: str, *argv: str) -> str:
    """What a command says in a namespace of the lab."""
    state = keeper_of(lab)
    child = subprocess.run(
        [sys.executable, "-c", ENTER, str(state.pid), str(state.namespaces[place]), *argv],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


ENTER = """
import os, sys
from ftctl.lab.namespaces import enter
enter(int(sys.argv[1]), int(sys.argv[2]))
os.execvp(sys.argv[3], sys.argv[3:])
"""

TAKE_DOWN = """
from pyroute2 import IPRoute
with IPRoute() as ip:
    ip.link("set", index=ip.link_lookup(ifname="rail0")[0], state="down")
"""
CARRIER = """
from pyroute2 import IPRoute
with IPRoute() as ip:
    link = ip.get_links(ifname="rail0")[0]
    print(link.get("state"), link.get_attr("IFLA_CARRIER"))
"""
TALK = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5000), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print("listening", flush=True)
connection, peer = listener.accept()
connection.sendall(connection.recv(100).upper())
"""
ASK = """
import socket, sys
s = socket.create_connection((sys.argv[1], 5000), timeout=60, source_address=(sys.argv[2], 0))
s.sendall(b"hello")
print(s.recv(100).decode())
"""


def talk(lab: Lab, listener: str, address: str, caller: str, source: str) -> str:
    """`caller` connects to `address` of `listener` and gets its word back in capitals."""
    state = keeper_of(lab)
    enter = [sys.executable, "-c", ENTER, str(state.pid), str(state.namespaces[listener])]
    server = subprocess.Popen([*enter, sys.executable, "-c", TALK, address], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "listening\n"
        return inside(lab, caller, sys.executable, "-c", ASK, address, source).strip()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def test_nodes_reach_each_other_over_every_rail_and_the_fabric_over_management(state_dir: Path) -> None:
    before = machine()
    lab = up(replicas=2)
    first, second = lab.nodes
    for rail, peer in zip(first.rails, second.rails, strict=True):
        assert talk(lab, "node1", peer.address, "node0", rail.address) == "HELLO"
        assert talk(lab, "node1", peer.address6, "node0", rail.address6) == "HELLO"
    assert talk(lab, "fabric", "10.99.0.254", "node1", second.management.address) == "HELLO"
    devices = inside(
        lab, "node0", sys.executable, "-c", "import socket; print(sorted(n for _, n in socket.if_nameindex()))"
    )
    assert devices.strip() == "['lo', 'mgmt0', 'rail0', 'rail1']"
    # The host sees nothing of it while it runs, and nothing is left when it is gone.
    assert machine() <= before
    assert lifecycle.take_down("lab").lines() == []  # type: ignore[union-attr]
    assert machine() <= before
    assert list(state_dir.joinpath("labs").iterdir()) == []
    assert remains(lab.manifest.uuid) == []


def test_a_node_that_takes_its_rail_down_leaves_its_peers_carrier_up(state_dir: Path) -> None:
    lab = up(replicas=2)
    inside(lab, "node0", sys.executable, "-c", TAKE_DOWN)
    assert inside(lab, "node0", sys.executable, "-c", CARRIER).split()[0] == "down"
    assert inside(lab, "node1", sys.executable, "-c", CARRIER).split() == ["up", "1"]


def test_rate_is_set_on_both_ends_of_every_rail(state_dir: Path) -> None:
    lab = up(replicas=1, rate="100mbit")
    rates = """
from pyroute2 import IPRoute
with IPRoute() as ip:
    for qdisc in ip.get_qdiscs():
        if qdisc.get_attr('TCA_KIND') == 'tbf':
            name = ip.get_links(qdisc['index'])[0].get_attr('IFLA_IFNAME')
            print(name, qdisc.get_attr('TCA_OPTIONS').get_attr('TCA_TBF_PARMS')['rate'] * 8)
"""
    assert inside(lab, "node0", sys.executable, "-c", rates).splitlines() == ["rail0 100000000", "rail1 100000000"]
    assert inside(lab, "fabric", sys.executable, "-c", rates).splitlines() == [
        "n0-rail0 100000000",
        "n0-rail1 100000000",
    ]


def test_the_keeper_starts_again_what_dies(state_dir: Path) -> None:
    lab = up()
    victim = child_of(lab, "sleep-node0")
    os.kill(victim.pid, signal.SIGKILL)
    eventually(lambda: child_of(lab, "sleep-node0").restarts == 1, "the dead process was not started again")
    again = child_of(lab, "sleep-node0")
    assert (again.state, again.exit_code) == ("running", -signal.SIGKILL)
    assert again.pid != victim.pid
    assert child_of(lab, "sleep-node1").restarts == 0


def test_down_after_sigkill_of_the_keeper(state_dir: Path) -> None:
    before = machine()
    lab = up()
    os.kill(keeper_of(lab).pid, signal.SIGKILL)
    eventually(lambda: len(processes_of(lab.manifest.uuid)) == 3, "the others should live on")
    assert [(info.name, info.alive) for info in list_labs()] == [("lab", True)]
    assert lifecycle.take_down("lab").lines() == []  # type: ignore[union-attr]
    assert remains(lab.manifest.uuid) == []
    assert machine() <= before
    assert list_labs() == []


def test_down_ends_a_process_that_left_its_session_and_ignores_sigterm(state_dir: Path) -> None:
    def stubborn(paths, manifest, nodes, credentials):  # type: ignore[no-untyped-def]
        code = (
            "import os, signal, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "if os.fork() == 0:\n    os.setsid()\n    os.fork()\ntime.sleep(1000)"
        )
        return (ProcessSpec(name="s", namespace="node0", argv=(sys.executable, "-c", code), log=str(paths.log("s"))),)

    def ready(lab: Lab) -> None:
        eventually(lambda: len(processes_of(lab.manifest.uuid)) == 4, "keeper and three stubborn ones")

    lab = lifecycle.bring_up(LabOptions(replicas=1), ready, processes=stubborn)
    assert lifecycle.take_down("lab").lines() == []  # type: ignore[union-attr]
    assert remains(lab.manifest.uuid) == []


def test_two_labs_side_by_side_know_nothing_of_each_other(state_dir: Path) -> None:
    one, two = up("one"), up("two")
    with pytest.raises(UsageProblem, match="lab one: is already up"):
        up("one")
    assert all_running(one), "a refused `lab up` must not touch the lab that is there"
    # The same addresses in both, and each talks to its own.
    for lab in (one, two):
        assert talk(lab, "node1", "10.99.1.2", "node0", "10.99.1.1") == "HELLO"
    pids = {child.name: child.pid for child in keeper_of(two).children}
    lifecycle.take_down("one")
    assert remains(one.manifest.uuid) == []
    assert {child.name: child.pid for child in keeper_of(two).children} == pids
    assert all_running(two)
    assert [(info.name, info.alive) for info in list_labs()] == [("two", True)]


def test_what_a_dead_lab_left_is_replaced(state_dir: Path) -> None:
    lab = up()
    for found in processes_of(lab.manifest.uuid):
        os.kill(found.pid, signal.SIGKILL)
    eventually(lambda: not processes_of(lab.manifest.uuid), "killed")
    assert [(info.name, info.alive) for info in list_labs()] == [("lab", False)]
    again = up()
    assert again.manifest.uuid != lab.manifest.uuid
    assert all_running(again)


def test_a_lab_that_does_not_become_ready_is_removed_and_its_logs_are_kept(state_dir: Path) -> None:
    before = machine()

    def never(_lab: Lab) -> None:
        raise CliError("lab lab", "r1 did not contribute", "look at its log")

    with pytest.raises(CliError) as caught:
        lifecycle.bring_up(LabOptions(replicas=2), never, processes=sleepers)
    assert str(state_dir / "failed" / "lab") in caught.value.hint
    assert (state_dir / "failed" / "lab" / "keeper.log").exists()
    assert list_labs() == []
    assert machine() <= before


UP = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tests.lab.conftest import sleepers
from ftctl.lab import lifecycle
from ftctl.lab.layout import LabOptions
def ready(lab):
    print("half way", lab.manifest.uuid, flush=True)
    time.sleep(1000)
try:
    lifecycle.bring_up(LabOptions(replicas=2), ready, processes=sleepers)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_lab_up_early_nothing_is_left(state_dir: Path, number: signal.Signals) -> None:
    before = machine()
    root = Path(__file__).parents[2]
    child = subprocess.Popen([sys.executable, "-c", UP, str(root)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    words = child.stdout.readline().split()
    assert words[:2] == ["half", "way"]
    child.send_signal(number)
    # After SIGKILL it is the keeper that notices and takes the lab down, so the end comes a little later.
    assert child.wait(timeout=90) == (-number if number == signal.SIGKILL else 130)
    child.stdout.close()
    eventually(lambda: not remains(words[2]), "processes or sockets are left")
    eventually(lambda: list_labs() == [], "the lab's directory is left")
    assert machine() <= before


ROOTLESS = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.lab.conftest import machine, remains
from tests.lab.test_lab import lifecycle, talk, up
before = machine()
lab = up(rate="1gbit")
print(talk(lab, "node1", "10.99.2.2", "node0", "10.99.2.1"))
print(lifecycle.take_down("lab").lines(), remains(lab.manifest.uuid), machine() <= before)
"""


AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
AS_POWERLESS_ROOT = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")  # as in a container
only_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv to become somebody else"
)


def python_for_nobody() -> tuple[str, dict[str, str]]:
    """An interpreter that another user may run: this one, or the system's of the same version with our packages."""
    root = Path(__file__).parents[2]
    packages = os.pathsep.join([str(root), *(path for path in sys.path if path.endswith("site-packages"))])
    system = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin")
    for python, env in ((sys.executable, {}), (system or "", {"PYTHONPATH": packages})):
        # Through a shell: the interpreter must be runnable after the change of user, as the keeper will run it.
        argv = [*AS_NOBODY, "sh", "-c", 'exec "$0" -c "import ftctl, msgspec, pyroute2, cryptography"', python]
        if subprocess.run(argv, env={**os.environ, **env}, capture_output=True, check=False).returncode == 0:
            return python, env
    pytest.skip("another user may not run this Python")


@only_root
def test_without_root_inside_a_user_namespace(state_dir: Path) -> None:
    python, env = python_for_nobody()
    os.chown(state_dir, 65534, 65534)
    child = subprocess.run(
        [*AS_NOBODY, python, "-c", ROOTLESS, str(Path(__file__).parents[2])],
        env={**os.environ, **env},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == ["HELLO", "[] [] True"]


@pytest.fixture
def small_disk(state_dir: Path) -> Iterator[Path]:
    """The state directory is a file system of 6 MiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(state_dir)], check=True)
    try:
        yield state_dir
    finally:
        subprocess.run(["umount", "--lazy", str(state_dir)], check=True)


@only_root
def test_a_full_disk_is_the_reason_whatever_fails_on_it(small_disk: Path) -> None:
    def fills_up(_lab: Lab) -> None:
        with suppress(OSError), (small_disk / "big").open("wb") as big:
            while True:
                big.write(bytes(1 << 12))
                big.flush()
        raise CliError("agent of node0", "no answer", "ftctl doctor")

    options = LabOptions(name="lab", replicas=2)
    with pytest.raises(CliError) as caught:
        lifecycle.bring_up(options, fills_up, processes=sleepers)
    assert str(caught.value) == f"lab lab: only 0 KiB are left in {small_disk}/labs/lab (agent of node0: no answer)"
    assert "df -h" in caught.value.hint
    with pytest.raises(UsageProblem, match=r"only \d+ KiB are left in .*/labs$"):
        lifecycle.bring_up(options, fills_up, processes=sleepers)
    assert list_labs() == []


@only_root
def test_root_without_capabilities_is_refused_in_one_line(state_dir: Path) -> None:
    """The kernel maps uid 0 into a user namespace only for a holder of CAP_SETFCAP: no way round for such a root."""
    before = machine()
    child = subprocess.run(
        [*AS_POWERLESS_ROOT, sys.executable, "-c", ROOTLESS, str(Path(__file__).parents[2])],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 1
    assert "gives no user namespace to uid 0" in child.stderr.splitlines()[-1]
    assert list_labs() == []
    assert machine() <= before


def test_no_user_namespaces_is_said_in_one_line_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose administrator has forbidden them."""

    def refused(_flags: int) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(namespaces, "unshare", refused)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(namespaces.NamespaceError) as caught:
        namespaces.become_root_of_user_namespace()
    assert "gives no user namespace" in str(caught.value)
    assert "run as root" in caught.value.hint
