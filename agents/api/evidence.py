"""What a rank's process is doing: the part of the contract (models.py) behind `ftctl dump`.

| route | role | asks | answers |
|---|---|---|---|
| POST /v1/replicas/{r}/stacks | operator | StacksRequest | StacksAnswer |

A POST although it changes nothing for the job: the process is sent a signal, on which it writes down its stacks.
"""

from __future__ import annotations

from pydantic import Field

from agents.api.base import Answer, Request


class StacksRequest(Request):
    """`rank` None: all ranks of the replica on this node, 16 at most."""

    rank: int | None = Field(default=None, ge=0, le=65535)


class ThreadView(Answer):
    """`state` as in proc(5), `wchan` the kernel function it sleeps in, `syscall` as in /proc; "" where unreadable."""

    tid: int
    name: str
    state: str
    wchan: str
    syscall: str


class RankStacks(Answer):
    """`summary`: one sentence. `python`: faulthandler's text of all threads, at most 128 KiB; `note`: why it is empty.
    `state` "" if the process is gone."""

    replica: str
    rank: int
    node: str
    pid: int
    time: float
    state: str
    summary: str
    python: str = ""
    note: str = ""
    status: dict[str, str] = Field(default_factory=dict)
    threads: list[ThreadView] = Field(default_factory=list)
    threads_left_out: int = 0
    kernel_stack: str = ""


class StacksAnswer(Answer):
    ranks: list[RankStacks]
