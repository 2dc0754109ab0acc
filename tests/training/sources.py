"""Sources of state without a job around them, shadows that fetch from them, and rails between that can fail."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping

import torch
from torch import nn

from ftar_core.runtime.rails import Rail
from ftar_core.training.dial import Identity
from ftar_core.training.follow import Follower, ReplayStep, Snapshot
from ftar_core.training.plan import BucketPlan, make_plan
from ftar_core.training.shelf import StepItem
from ftar_core.training.state import EncodedState, LiveState, Stateful, look_at_state
from ftar_core.training.statewire import StepData
from ftar_core.training.transfer import StateServer
from ftar_core.wire.ids import EpochId, Term
from ftar_core.wire.messages import Endpoint, MemberInfo, RankInfo, Verdict

TOKEN = b"0123456789abcdef"
RAILS = (Rail("a", "", "127.0.0.1"), Rail("b", "", "127.0.0.2"))
EPOCH = EpochId(Term(1, "c"), 3)
DEADLINE_S = 90.0


def small_plan() -> BucketPlan:
    return make_plan(nn.Linear(300, 1000))


class Part:
    """A little over two pieces of one tensor."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        value = self.value
        return {"big": torch.full((600_000,), value), "empty": torch.zeros(0), "one": torch.tensor(value)}

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        raise AssertionError


def encode_state(parts: Mapping[str, Stateful]) -> EncodedState:
    """A copy as a source's copier makes it, at once."""
    live = look_at_state(parts)
    copies = (torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for tensor in live.tensors)
    return EncodedState(live.skeleton, live.infos, tuple(copies))


def state_of(value: float) -> EncodedState:
    return encode_state({"part": Part(value)})


def settle(server: StateServer) -> None:
    """The next update is due when a copy is done."""
    until(lambda: not server.shelf.copier.busy, "the copy is done")
    assert server.settle() == ""


class Source:
    """A contributor at `step`: its state server, and the two things the training thread does for it."""

    def __init__(
        self, name: str, plan: BucketPlan, step: int, *, buffer_bytes: int = 1 << 28, mbit: float = 0.0
    ) -> None:
        self.name, self.plan, self.step = name, plan, step
        self.asked = threading.Event()
        self.copies = 0
        self.server = StateServer(
            job="job",
            token=TOKEN,
            plan=plan.hash,
            rails=RAILS,
            on_request=self.asked.set,
            buffer_bytes=buffer_bytes,
            mbit=mbit,
        )
        self.server.serve(True)

    @property
    def info(self) -> MemberInfo:
        rank = RankInfo(rank=0, node="n", links=(), state=self.server.endpoints)
        return MemberInfo(replica=self.name, incarnation=1, slot=0, ranks=(rank,))

    def at_boundary(self) -> None:
        """Behind an update: a copy for whoever has asked, which is done before the next update."""

        def live() -> LiveState:
            self.copies += 1
            return look_at_state({"part": Part(float(self.step))})

        self.server.look(self.step, EPOCH, live, behind_update=True)
        settle(self.server)

    def commit(self, verdict: Verdict = Verdict.APPLY) -> None:
        self.step += 1
        buckets = tuple(torch.full((b.count,), self.step, dtype=b.dtype) for b in self.plan.all_buckets)
        if verdict is Verdict.SKIP:
            buckets = ()
        sizes = tuple(b.numel() * b.element_size() for b in buckets)
        header = StepData(step=self.step, epoch=EPOCH, verdict=verdict, contributors=(self.name,), sizes=sizes)
        self.server.publish(StepItem(header, buckets))


class World:
    def __init__(self) -> None:
        self.plan = small_plan()
        self.stack = contextlib.ExitStack()

    def source(self, name: str = "r0", step: int = 5, **options: float) -> Source:
        source = Source(name, self.plan, step, **options)
        self.stack.callback(source.server.close)
        return source

    def follower(self, *sources: MemberInfo, have: int = -1, token: bytes = TOKEN, **options: int) -> Follower:
        follower = Follower(
            identity=Identity("job", token, "r9", 4),
            plan=self.plan,
            rails=RAILS,
            sources=sources,
            have=have,
            on_news=lambda: None,
            **options,
        )
        self.stack.callback(follower.close)
        return follower


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.002)


def next_item(follower: Follower, *serving: Source) -> Snapshot | ReplayStep:
    """`serving`: sources that reach a boundary again and again meanwhile."""
    found: list[Snapshot | ReplayStep] = []

    def got() -> bool:
        for source in serving:
            if source.server.wanted():
                source.at_boundary()
        item = follower.poll()
        if item is not None:
            found.append(item)
        return item is not None

    until(got, f"an item ({follower.text})")
    return found[0]


def serve_one(source: Source) -> None:
    until(source.server.wanted, "the shadow asks for a snapshot")
    source.at_boundary()


def assert_snapshot(item: Snapshot | ReplayStep, step: int) -> None:
    assert isinstance(item, Snapshot)
    assert item.step == step
    assert item.epoch == EPOCH
    assert item.state is not None
    expected = state_of(float(step))
    assert item.state.skeleton == expected.skeleton
    assert all(torch.equal(a, b) for a, b in zip(item.state.tensors, expected.tensors, strict=True))


def assert_step(item: Snapshot | ReplayStep, step: int) -> None:
    assert isinstance(item, ReplayStep)
    assert item.step == step
    assert all(bool((bucket == step).all()) for bucket in item.buckets)
    assert len(item.buckets) == len(small_plan().all_buckets)


class Proxy:
    """A rail that can be cut: forwards TCP to a state server, for a given number of bytes."""

    def __init__(self, target: Endpoint, fail_after: int | None) -> None:
        self._target = (target.addr, target.port)
        self._left = fail_after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(rail=target.rail, addr="127.0.0.1", port=self._listener.getsockname()[1])
        self.connections = 0
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if counted and self._left is not None:
                    self._left -= len(data)
                    if self._left < 0:
                        break
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


def through(info: MemberInfo, *endpoints: Endpoint) -> MemberInfo:
    rank = RankInfo(rank=0, node="n", links=(), state=endpoints)
    return MemberInfo(replica=info.replica, incarnation=info.incarnation, slot=info.slot, ranks=(rank,))


class FlippingProxy(Proxy):
    def __init__(self, target: Endpoint, at: int) -> None:
        self._at = at
        super().__init__(target, None)

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if counted and passed <= self._at < passed + len(data):
                    changed = bytearray(data)
                    changed[self._at - passed] ^= 0x10
                    data = bytes(changed)
                passed += len(data)
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
