"""The command line as such: help, usage errors, what it imports, interruption, pipes, the doctor."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import typer.main

from ftctl import app as application
from ftctl.app import COMMANDS, main
from ftctl.context import World

from .conftest import Run
from .fake_agent import FakeCluster

RUN = "import sys; from ftctl.app import main; sys.exit(main())"


def command_paths() -> list[tuple[str, ...]]:
    paths: list[tuple[str, ...]] = [()]
    for name in COMMANDS:
        if name == "lab":
            continue  # has its own tests
        paths.append((name,))
        command: typing.Any = application.LazyGroup(name="ftctl").get_command(None, name)
        paths += [(name, sub) for sub in getattr(command, "commands", {})]
    return paths


@pytest.mark.parametrize("path", command_paths(), ids=" ".join)
def test_every_command_explains_itself(bare: Run, capsys: pytest.CaptureFixture[str], path: tuple[str, ...]) -> None:
    assert bare(*path, "--help").code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: {' '.join(('ftctl', *path))}")
    assert "--help" in text


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "lab"])
def test_the_list_of_commands_says_what_the_commands_say(name: str) -> None:
    command: typing.Any = application.LazyGroup(name="ftctl").get_command(None, name)
    assert (command.help or "").splitlines()[0] == COMMANDS[name].help


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = (
        "import sys; from ftctl.app import main; main(['--help']);"
        "print([n for n in ('httpx', 'rich', 'pydantic', 'torch', 'asyncio', 'ftctl.commands') if n in sys.modules],"
        " file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stderr.strip() == "[]"
    assert "Exit codes:" in done.stdout


def test_no_command_loads_torch_or_the_native_core(cluster: FakeCluster) -> None:
    """In a fresh interpreter, with every command imported and a status answered."""
    code = (
        "import sys, importlib\n"
        "from ftctl.app import COMMANDS, main\n"
        "for lazy in COMMANDS.values():\n"
        "    importlib.import_module(lazy.module)\n"
        "assert main(['status']) == 0\n"
        "assert main(['doctor']) in (0, 1)\n"
        "bad = [n for n in sys.modules if n.split('.')[0] in ('torch', 'fastapi', 'uvicorn')"
        " or n.startswith(('ftar_core.native', 'ftar_core.runtime', 'ftar_core.training', 'ftar_core.coordinator',"
        " 'agents.daemon', 'agents.server', 'agents.injection'))]\n"
        "print('BAD', bad)\n"
    )
    env = {**os.environ, "FTCTL_INVENTORY": str(cluster.inventory)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, env=env, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["BAD []"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("statsu",), "statsu: no such command"),
        (("status", "--nope"), "no such option: --nope"),
        (("status", "-o", "xml"), "'-o': 'xml' is not one of"),
        (("wait", "replica"), "missing argument"),
        (("why", "nodes"), "no such command 'nodes'"),
        (("status",), "inventory: none is given"),
    ],
)
def test_usage_errors_are_one_line_and_a_next_step(bare: Run, arguments: tuple[str, ...], expected: str) -> None:
    result = bare(*arguments)
    assert result.code == 2
    assert result.out == ""
    first, second = result.err.strip().splitlines()
    assert first.startswith("error: ")
    assert expected in first
    assert second.startswith("next:  ftctl")


def test_an_internal_error_is_a_line_too_and_a_traceback_on_request(
    bare: Run, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(typer.main, "get_command", broken)
    result = bare("version")
    assert result.code == 1
    assert "internal error: ZeroDivisionError: oops" in result.err
    world.environ = {"FTCTL_DEBUG": "1"}
    with pytest.raises(ZeroDivisionError):
        main(["version"], world)


def test_the_version_is_a_document_too(bare: Run) -> None:
    number = bare("version").out.split()[1]
    assert bare("version", "-o", "json").json() == {"schema": 1, "version": number}
    assert bare("version", "-o", "yaml").out == f"---\nschema: 1\nversion: {number}\n"


def test_a_reader_that_leaves_ends_it_quietly(cluster: FakeCluster) -> None:
    env = {**os.environ, "FTCTL_INVENTORY": str(cluster.inventory)}
    done = subprocess.run(
        ["sh", "-c", f"'{sys.executable}' -c '{RUN}' status -o json | head -c 1"],
        capture_output=True,
        text=True,
        timeout=240,
        env=env,
        check=False,
    )
    assert done.stdout == "{"
    assert done.stderr == ""


def test_watching_ends_with_ctrl_c_and_130(cluster: FakeCluster) -> None:
    env = {**os.environ, "FTCTL_INVENTORY": str(cluster.inventory)}
    child = subprocess.Popen(
        [sys.executable, "-c", RUN, "status", "--watch", "--interval", "100ms", "-o", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        assert child.stdout is not None
        pages = [json.loads(child.stdout.readline()) for _ in range(2)]
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=90)
    finally:
        child.kill()
        child.wait()
    assert pages[1]["time"] > pages[0]["time"]
    assert child.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours_on_a_terminal_unless_no_color(cluster: FakeCluster, no_color: str, coloured: bool) -> None:
    master, slave = pty.openpty()
    env = {**os.environ, "FTCTL_INVENTORY": str(cluster.inventory), "TERM": "xterm-256color", "COLUMNS": "120"}
    env.pop("NO_COLOR", None)
    if no_color:
        env["NO_COLOR"] = no_color
    try:
        with subprocess.Popen([sys.executable, "-c", RUN, "status"], stdout=slave, stderr=slave, env=env) as child:
            os.close(slave)
            text = b""
            while True:
                try:
                    chunk = os.read(master, 65536)
                except OSError:  # EIO: the other end is closed
                    break
                if not chunk:
                    break
                text += chunk
            child.wait(timeout=90)
    finally:
        os.close(master)
    assert b"running" in text
    assert (b"\x1b[" in text) is coloured


def test_a_narrow_terminal_still_shows_every_rail(cluster: FakeCluster) -> None:
    env = {**os.environ, "FTCTL_INVENTORY": str(cluster.inventory), "COLUMNS": "60"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, "status"], capture_output=True, text=True, timeout=240, env=env, check=True
    )
    assert done.stdout.count("rail1") == 3


def test_the_doctor_knows_this_machine(bare: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTAR_NET_RAILS", "a=127.0.0.1")
    result = bare("doctor", "-o", "json")
    document = result.json()
    checks = {check["name"]: check for check in document["checks"]}
    assert {"python", "package agents", "dependencies", "native core", "torch", "namespaces", "NVML"} <= set(checks)
    assert all(check["status"] in ("ok", "warn", "missing") and check["text"] for check in checks.values())
    assert checks["NCCL rails"]["status"] == "warn"
    assert "a only: an NCCL job ends when it fails" in checks["NCCL rails"]["text"]
    assert checks["package ftctl"]["status"] == "ok"
    assert result.code == (0 if document["ok"] else 1)


def test_the_doctor_finds_a_foreign_package_in_the_way(tmp_path_factory: pytest.TempPathFactory) -> None:
    foreign = tmp_path_factory.mktemp("foreign")
    (foreign / "agents").mkdir()
    (foreign / "agents" / "__init__.py").write_text("")
    ours = str(Path(application.__file__).parent.parent)
    code = (  # -S: an editable installation would put our packages before everything on the path
        f"import sys; sys.path[:0] = [{str(foreign)!r}, {ours!r}]\n"
        "from ftctl.commands.checks import _packages_in_the_way\n"
        "print({c.name: (c.status, c.text) for c in _packages_in_the_way()}['package agents'])\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert "missing" in done.stdout
    assert str(foreign / "agents") in done.stdout


def test_a_probe_that_hangs_or_dies_is_a_line_in_the_report() -> None:
    from ftctl.commands import probes

    assert probes.run("import time; time.sleep(60)", 0.5).trouble == "no answer within 0.5 s"
    assert probes.run("import os; os.abort()", 30).trouble == "signal 6"
    assert "boom" in probes.run("raise SystemExit('boom')", 30).trouble
    assert probes.run("print('{\"a\": 1}')", 30).answer == {"a": 1}


def test_a_wait_that_ctrl_c_cancelled_is_no_traceback(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """anyio lets the reader of a Unix socket set a result that was cancelled in the same turn of the loop."""

    async def interrupted() -> None:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        loop.call_soon(waiting.set_result, None)
        waiting.cancel()
        await asyncio.sleep(0)
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(0.01)

    world.run(interrupted())
    assert "InvalidStateError" not in caplog.text
    assert "ZeroDivisionError" in caplog.text, "all else is still said"


def test_what_a_command_finds_out_is_not_written_down_for_nobody() -> None:
    """asyncio shows the main task to a lookup of signal handlers, with its result: seconds where that is a fleet."""

    class Fleet:
        shown = 0

        def __repr__(self) -> str:
            self.shown += 1
            return "a fleet"

    async def ask() -> Fleet:
        return Fleet()

    assert World().run(ask()).shown == 0


def test_a_host_that_is_none_is_a_problem_of_the_inventory(bare: Run, tmp_path: Path) -> None:
    token, inventory = tmp_path / "token", tmp_path / "inventory.yaml"
    token.write_text("secret-secret-secret\n")
    token.chmod(0o600)
    url = f"https://{'x' * 64}.example:7610"
    nodes = f"nodes:\n  - {{name: node0, url: '{url}'}}\n"
    inventory.write_text(f"version: 1\njob: main\ntoken_file: {token}\n{nodes}")
    result = bare("status", "--inventory", str(inventory))
    assert result.code == 2
    assert "is no URL" in result.err
