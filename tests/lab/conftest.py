"""Labs for tests: their files in a temporary state directory, and nothing left on the machine whatever a test does."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ftctl.lab import namespaces, teardown
from ftctl.lab.credentials import Credentials
from ftctl.lab.layout import Node
from ftctl.lab.manifest import MARKER, Manifest, ProcessSpec
from ftctl.lab.paths import LabPaths, runtime_dir_for
from ftctl.lab.processes import processes_of
from ftctl.lab.registry import list_labs


def can_make_namespaces() -> bool:
    if os.geteuid() == 0:
        return True
    child = os.fork()
    if child == 0:
        try:
            namespaces.become_root_of_user_namespace()
            namespaces.new_network()
        except namespaces.NamespaceError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


needs_namespaces = pytest.mark.skipif(
    not can_make_namespaces(), reason="neither root nor user namespaces: no lab on this machine"
)


@pytest.fixture
def state_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory of the test's own. Labs that the test leaves in it are removed."""
    path = Path(tempfile.mkdtemp(prefix="ftctl-test-"))
    monkeypatch.setenv("FTCTL_STATE_DIR", str(path))
    for name in (MARKER, "FTCTL_LAB", "FTCTL_INVENTORY"):
        monkeypatch.delenv(name, raising=False)
    yield path
    for lab in list_labs():
        teardown.take_down(lab.paths, grace_s=0)
    shutil.rmtree(path, ignore_errors=True)


def sleepers(
    _paths: LabPaths, _manifest: Manifest, nodes: Sequence[Node], _credentials: Credentials
) -> tuple[ProcessSpec, ...]:
    """Stand-ins for the coordinator and the agents: processes that do nothing, in the right places."""
    places = ["fabric", *(node.name for node in nodes)]
    sleep = shutil.which("sleep") or "/bin/sleep"
    return tuple(
        ProcessSpec(name=f"sleep-{place}", namespace=place, argv=(sleep, "1000"), log=str(_paths.log(f"sleep-{place}")))
        for place in places
    )


def eventually(check: Callable[[], object], what: str, within_s: float = 90.0) -> None:
    """Polls until `check` is true; fails the test with `what` otherwise."""
    deadline = begun = time.monotonic()
    deadline += within_s
    while not check():
        now = time.monotonic()
        assert now < deadline, what
        time.sleep(min(1.0, max(0.02, now - begun)))  # a look that costs a process leaves the lab room to go on
        begun = time.monotonic()


def remains(uuid: str) -> list[str]:
    """Processes and the sockets' directory of a lab, once it ought to be gone."""
    place = runtime_dir_for(uuid)
    return [*(f"{found.pid} {found.argv}" for found in processes_of(uuid)), *([str(place)] if place.exists() else [])]


def machine() -> set[str]:
    """What a lab must not add to: named namespaces, links, routes, nftables.

    A test asserts `machine() <= before`. Other tests, running beside this one, may take away what was theirs.
    """

    def said(*argv: str) -> list[str]:
        if shutil.which(argv[0]) is None:
            return []
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.splitlines()

    return {
        *(f"netns {line}" for line in said("ip", "netns", "list") if not line.startswith("ftart")),  # tests of links
        *(f"link {name}" for name in os.listdir("/sys/class/net")),
        *(f"route {line}" for line in said("ip", "route")),
        *(f"nft {line}" for line in said("nft", "list", "ruleset")),
    }
