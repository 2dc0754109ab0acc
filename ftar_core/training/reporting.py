"""What a rank tells the agent of its node, for `ftctl status` and `ftctl ranks`: a view, on which nothing depends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ftar_core.runtime.agentlink import AgentLink
from ftar_core.runtime.settings import Settings
from ftar_core.runtime.stacks import StackWriter
from ftar_core.wire.agentlink import LinkReport, RankRegister, RankReport, ToRank

if TYPE_CHECKING:
    from ftar_core.native._core import LinkStat


class Reporter:
    """Without FTAR_AGENT it does nothing. `on_order`: takes what the agent asks for; None: nothing may be asked for."""

    def __init__(
        self,
        settings: Settings,
        links: Callable[[], list[LinkStat]],
        on_order: Callable[[ToRank], None] | None = None,
    ) -> None:
        self._links = links
        self._lock = threading.Lock()
        self._stacks = StackWriter() if settings.agent is not None else None
        if self._stacks is not None:
            self._stacks.start()
        self._report = RankReport(state="starting", step=0, term=0, epoch=0, contributors=(), links=())
        register = RankRegister(
            job=settings.job,
            replica=settings.replica,
            rank=settings.rank,
            pid=os.getpid(),
            rails=tuple(rail.name for rail in settings.rails),
            stacks=self._stacks.way if self._stacks is not None else None,
            breakpoints=on_order is not None,
        )
        self._link = AgentLink(settings.agent, register, on_order) if settings.agent is not None else None

    def start(self) -> None:
        if self._link is not None:
            self._link.start()
            self.refresh()

    def update(
        self,
        *,
        state: str | None = None,
        step: int | None = None,
        term: int | None = None,
        epoch: int | None = None,
        contributors: tuple[str, ...] | None = None,
        last_stall_ms: float | None = None,
        tokens_per_s: float | None = None,
        loss: float | None = None,
        compute_ms: float | None = None,
        wait_ms: float | None = None,
    ) -> None:
        """What is None stays as it was. Any thread."""
        given = {
            "state": state,
            "step": step,
            "term": term,
            "epoch": epoch,
            "contributors": contributors,
            "last_stall_ms": last_stall_ms,
            "tokens_per_s": tokens_per_s,
            "loss": loss,
            "compute_ms": compute_ms,
            "wait_ms": wait_ms,
        }
        with self._lock:
            changes = {name: value for name, value in given.items() if value is not None}
            self._report = msgspec.structs.replace(self._report, **changes)
        self.refresh()

    def refresh(self) -> None:
        """Send the last report with the links as they are now (a rail has changed)."""
        if self._link is not None:
            links = tuple(_report_of(link) for link in self._links())
            self._link.report(msgspec.structs.replace(self._report, links=links))

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._stacks is not None:
            self._stacks.close()


def _report_of(link: LinkStat) -> LinkReport:
    return LinkReport(
        peer=link["peer"],
        rail=link["rail"],
        direction=link["direction"],
        state=link["state"],
        active=link["active"],
        reason=link["reason"],
        since_s=link["since_s"],
        flaps=link["flaps"],
        resumes=link["resumes"],
        bytes=link["bytes"],
    )
