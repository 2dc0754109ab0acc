"""Where the agents are: flags > environment > ./ftctl.yaml > the user's file > the only running lab."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ftctl.config import Flags, Inventory, load, parse_node
from ftctl.context import LabEntry, World
from ftctl.errors import UsageProblem

TOKEN = "0123456789abcdef0123456789abcdef"
GOOD = "version: 1\njob: main\ntoken_file: token\nnodes:\n  - {name: node0, url: 'unix://a.sock'}\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        token = path.parent / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        return path

    return write


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(environ={}, cwd=tmp_path / "here", user_config=lambda: tmp_path / "user/ftctl.yaml", running_labs=list)


def inventory(world: World, flags: Flags | None = None) -> Inventory:
    return load(world, flags or Flags()).inventory


def job(name: str) -> str:
    return GOOD.replace("job: main", f"job: {name}")


def test_each_source_overrides_the_next(world: World, write: Callable[[str, str], Path]) -> None:
    labs = [LabEntry("main", write("lab/inventory.yaml", job("from-lab")))]
    world.running_labs = lambda: labs
    assert inventory(world).job == "from-lab"
    write("user/ftctl.yaml", job("from-user"))
    assert inventory(world).job == "from-user"
    write("here/ftctl.yaml", job("from-project"))
    assert inventory(world).job == "from-project"
    world.environ = {"FTCTL_LAB": "main"}
    assert inventory(world).job == "from-lab"
    world.environ = {"FTCTL_INVENTORY": str(write("env/i.yaml", job("from-environment")))}
    assert inventory(world).job == "from-environment"
    assert inventory(world, Flags(inventory=write("flag/i.yaml", job("from-flag")))).job == "from-flag"
    assert inventory(world, Flags(lab="main")).job == "from-lab"


def test_paths_are_relative_to_the_file_they_stand_in(world: World, write: Callable[[str, str], Path]) -> None:
    path = write("somewhere/i.yaml", GOOD)
    found = inventory(world, Flags(inventory=path))
    assert found.nodes[0].socket == path.parent / "a.sock"
    assert found.token == TOKEN
    write("here/ftctl.yaml", "version: 1\ninventory: ../somewhere/i.yaml\noutput: wide\ntimeout: 7s\n")
    settings = load(world, Flags())
    assert settings.inventory == found
    assert (settings.output.value, settings.timeout_s) == ("wide", 7.0)
    world.environ = {"FTCTL_TIMEOUT": "500ms", "FTCTL_OUTPUT": "json"}
    assert (load(world, Flags()).output.value, load(world, Flags()).timeout_s) == ("json", 0.5)
    assert load(world, Flags(timeout="1m")).timeout_s == 60


def test_a_users_own_token_is_never_lent_to_another_inventory(world: World, write: Callable[[str, str], Path]) -> None:
    secret = write("user/other-token", "s" * 32)
    secret.chmod(0o600)
    write("user/ftctl.yaml", "version: 1\ntoken_file: other-token\n")
    assert inventory(world, Flags(inventory=write("i.yaml", GOOD))).token == TOKEN
    assert inventory(world, Flags(inventory=write("i.yaml", GOOD), token_file=secret)).token == "s" * 32


def test_nothing_to_go_by_says_where_it_looked(world: World, write: Callable[[str, str], Path]) -> None:
    with pytest.raises(UsageProblem, match="no lab is running") as none:
        inventory(world)
    assert "ftctl lab up" in none.value.hint
    world.running_labs = lambda: [LabEntry("a", Path("a")), LabEntry("b", Path("b"))]
    with pytest.raises(UsageProblem, match="several labs are running: a, b"):
        inventory(world)
    with pytest.raises(UsageProblem, match="lab c: not running"):
        inventory(world, Flags(lab="c"))
    with pytest.raises(UsageProblem, match="--inventory and --lab"):
        inventory(world, Flags(lab="a", inventory=Path("x")))


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        ("version: 1\njob: main\nnods: []\n", ":3", "unknown key `nods`"),
        (GOOD + "  - {name: node1, url: 'unix://b', role: x}\n", ":6", "unknown key `nodes.1.role`"),
        (GOOD.replace("version: 1", "version: 2"), ":1", "`version`"),
        (GOOD.replace("version: 1\n", ""), ":1", "`version` is missing"),
        ("version: 1\njob: main\ntoken_file: token\n", ":1", "an inventory needs `nodes`"),
        ("version: 1\njob: main\ntoken_file: token\nnodes: []\n", ":4", "`nodes`"),
        (GOOD.replace("job: main\n", ""), ":1", "needs `job`"),
        (GOOD.replace("job: main", "job: Main!"), ":2", "cannot be a job's name"),
        (GOOD.replace("token_file: token\n", ""), ":1", "needs `token_file`"),
        (GOOD.replace("name: node0", "name: a/b"), ":5", "cannot be a node's name"),
        (GOOD + "  - {name: node0, url: 'unix://b'}\n", ":6", "named twice"),
        (GOOD.replace("unix://a.sock", "http://10.0.0.1:7610"), ":5", "plain http is refused off loopback"),
        (GOOD.replace("unix://a.sock", "ftp://10.0.0.1"), ":5", "is none of unix://"),
        (GOOD.replace("unix://a.sock", "https://u:p@h"), ":5", "only a host and a port"),
        (GOOD.replace("unix://a.sock", "https://h:99999"), ":5", "is no URL"),
        (GOOD.replace("a.sock", "x" * 120), ":5", "longer than 107 bytes"),
        (GOOD + "ca_file: nowhere.pem\n", ":6", "is not there"),
        ("version: 1\njob: [\n", ":3", "not YAML"),
        ("version: 1\njob: a\njob: b\n", ":3", "not YAML"),
        ("- 1\n", ":1", "a mapping is expected"),
        ("", ":1", "a mapping is expected"),
        ("version: 1\n\tjob: x\n", ":2", "not YAML"),
    ],
)
def test_a_bad_file_is_named_with_its_line(
    world: World, write: Callable[[str, str], Path], text: str, where: str, reason: str
) -> None:
    path = write("i.yaml", text)
    with pytest.raises(UsageProblem) as problem:
        inventory(world, Flags(inventory=path))
    assert problem.value.thing == f"{path}{where}"
    assert reason in problem.value.reason


def test_files_that_cannot_be_read(world: World, tmp_path: Path, write: Callable[[str, str], Path]) -> None:
    with pytest.raises(UsageProblem, match="No such file"):
        inventory(world, Flags(inventory=tmp_path / "nowhere.yaml"))
    with pytest.raises(UsageProblem, match="directory"):
        inventory(world, Flags(inventory=tmp_path))
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageProblem, match="not UTF-8"):
        inventory(world, Flags(inventory=binary))


def test_a_token_that_others_can_read_is_refused(world: World, write: Callable[[str, str], Path]) -> None:
    path = write("i.yaml", GOOD)
    (path.parent / "token").chmod(0o644)
    with pytest.raises(UsageProblem, match="other users may read") as problem:
        inventory(world, Flags(inventory=path))
    assert "chmod 600" in problem.value.hint
    (path.parent / "token").unlink()
    with pytest.raises(UsageProblem, match="No such file"):
        inventory(world, Flags(inventory=path))


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("https://10.0.0.1", "https://10.0.0.1:7610"),
        ("https://[fd00::1]:99/", "https://[fd00::1]:99"),
        ("http://127.0.0.7:1", "http://127.0.0.7:1"),
        ("http://[::1]", "http://[::1]:7610"),
        ("http://localhost", "http://localhost:7610"),
    ],
)
def test_addresses(url: str, base: str) -> None:
    node = parse_node("n", url, Path("/"))
    assert (node.base_url, node.socket) == (base, None)


def test_the_token_is_in_no_repr(world: World, write: Callable[[str, str], Path]) -> None:
    assert TOKEN not in repr(inventory(world, Flags(inventory=write("i.yaml", GOOD))))
