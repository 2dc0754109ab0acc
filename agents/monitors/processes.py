"""Replica processes that this agent does not supervise, but that registered with it: what psutil says about them."""

from __future__ import annotations

from agents.api.models import ProcessView, RankView
from agents.host.proc import ProcessReader


class ProcessMonitor:
    def __init__(self, reader: ProcessReader | None = None) -> None:
        self._reader = reader or ProcessReader()

    def read(self, ranks: list[RankView], supervised: set[int]) -> list[ProcessView]:
        """One view a registered rank whose pid is not among `supervised`."""
        others = [rank for rank in ranks if rank.pid not in supervised and rank.state != "gone"]
        views = []
        for rank in others:
            reading = self._reader.read(rank.pid)
            gone = reading is None or reading.status == "zombie"
            views.append(
                ProcessView(
                    replica=rank.replica,
                    rank=rank.rank,
                    pid=rank.pid,
                    state="exited" if gone else "running",
                    cpu_percent=reading.cpu_percent if reading else None,
                    rss_mb=reading.rss_mb if reading else None,
                    status=reading.status if reading else "",
                    reason="registered with this agent, not supervised by it",
                )
            )
        self._reader.forget_all_but({rank.pid for rank in others})
        return views
