"""Jobs whose gradients go over the fake libnccl, with its switches and its log."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftar_core.training.nccl import device
from tests.training.conftest import Job, until

from .fake import HostDevice, build


def use(library: Path) -> None:
    """In a replica's process: host memory is a device that NCCL works on."""
    device.DEVICES["cpu"] = lambda _: HostDevice(library)


class NcclJob(Job):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.library = build()
        self.switches = path / "switches"
        self.switches.mkdir()

    def environment(self, name: str) -> dict[str, str]:
        return {
            **super().environment(name),
            "FTAR_DATA_PLANE": "nccl",
            "FTAR_NCCL_LIBRARY": str(self.library),
            "FAKE_NCCL_SWITCHES": str(self.switches),
            "FAKE_NCCL_LOG": str(self.path / "nccl.said"),
            "FAKE_NCCL_NAME": name,
        }

    def start(self, *names: str, environment: dict[str, str] | None = None, **options: Any) -> None:
        super().start(*names, environment=environment, before=partial(use, self.library), **options)

    def start_team(
        self, *names: str, ranks: int = 2, environment: dict[str, str] | None = None, **options: Any
    ) -> None:
        before = partial(use, self.library)
        super().start_team(*names, ranks=ranks, environment=environment, before=before, **options)

    def switch(self, what: str, *, on: bool = True) -> None:
        (self.switches / what).touch() if on else (self.switches / what).unlink(missing_ok=True)

    def used_up(self, what: str) -> None:
        until(lambda: not (self.switches / what).exists(), lambda: f"{what} happened\n{self.logs()}")

    def communicators(self, name: str) -> list[tuple[int, str, int]]:
        """What this replica's library has said: (process, made or aborted, how many it has then)."""
        path = self.path / "nccl.said"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(pid), what, int(live)) for who, pid, what, live in lines if who == name]

    def assert_none_left(self, *names: str) -> None:
        """No process that ended by itself left a communicator, and none ever had two."""
        for name in names:
            said = self.communicators(name)
            last = [entry for entry in said if entry[0] == said[-1][0]]
            assert last[-1][1:] == ("aborted", 0), said
            assert all(live <= 1 for _, _, live in said), said


@pytest.fixture
def job(tmp_path: Path) -> Iterator[NcclJob]:
    made = NcclJob(tmp_path)
    try:
        yield made
    finally:
        made.close()
