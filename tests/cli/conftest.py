from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ftctl.app import main
from ftctl.context import World

from .fake_agent import FakeCluster


@dataclass
class Result:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


Run = Callable[..., Result]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory with a short path: that of a Unix socket holds 107 bytes, and pytest's own are long."""
    with tempfile.TemporaryDirectory(prefix="ftctl-") as name:
        yield Path(name)


@pytest.fixture
def cluster(folder: Path) -> Iterator[FakeCluster]:
    fake = FakeCluster(folder)
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def world(folder: Path) -> World:
    return World(
        environ={"FTCTL_TIMEOUT": "30s"},  # agents on a busy machine answer late
        stdin=io.StringIO(),
        stdout=io.StringIO(),
        stderr=io.StringIO(),
        cwd=folder,
        user_config=lambda: folder / "user" / "ftctl.yaml",
        running_labs=list,
    )


@pytest.fixture
def bare(world: World) -> Run:
    """Run a command line with no cluster given."""

    def run(*args: str) -> Result:
        world.stdout, world.stderr = io.StringIO(), io.StringIO()
        code = main(list(args), world)
        return Result(code, world.stdout.getvalue(), world.stderr.getvalue())

    return run


@pytest.fixture
def ftctl(world: World, cluster: FakeCluster) -> Run:
    """Run a command line against the fake cluster."""
    world.environ = {**world.environ, "FTCTL_INVENTORY": str(cluster.inventory)}

    def run(*args: str, answer: str | None = None) -> Result:
        world.stdout, world.stderr = io.StringIO(), Terminal() if answer is not None else io.StringIO()
        world.stdin = Terminal(answer) if answer is not None else io.StringIO()
        code = main(list(args), world)
        return Result(code, world.stdout.getvalue(), world.stderr.getvalue())

    return run


BOOK = """\
version: 1
name: unplug
description: A rail goes down.
tags: [quick]
environments: [staging]
steady_state:
  - {expect: replicas.contributing == 3}
method:
  - {inject: link-down, name: cable, target: {replica: r1, rail: active}, duration: 30s}
  - {wait: faults.active == 1, timeout: 2s}
"""
AFTER = "  - {revert: cable}\n"


@pytest.fixture
def book(cluster: FakeCluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTCTL_STATE_DIR", str(folder / "state"))
    text = cluster.inventory.read_text()
    cluster.inventory.write_text(text + "environment: staging\n")
    path = folder / "books" / "unplug.yaml"
    path.parent.mkdir()
    path.write_text(BOOK + AFTER)
    return path
