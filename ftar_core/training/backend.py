"""`torch.distributed` backend `ftar`: the replicate dimension of a device mesh, whose size changes while training runs.

    ftar_core.register_backend()
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("replicate", "shard"),
                            backend_override={"replicate": "ftar"})
    fully_shard(model, mesh=mesh)                       # as HSDP
    session = ftar_core.Session(model, optimizer)

A process group of torch has a fixed size, a job of ours has not: replicas die and come back. So a mesh is seen from
inside of one replica. Its replicate dimension has size 1 (a world of torch is one replica), and the group of that
dimension stands for the others, however many there are:

* In backward, an all-reduce is of gradients, and these become true behind the commit only, all buckets with the same
  contributors. The group leaves them as they are; the session's hooks take them, after the reduce-scatter inside the
  replica, and `session.step()` gives back the average over all replicas. FSDP2 needs nothing else of that dimension.
* In a turn of the loop, `all_reduce` (AVG, SUM), `broadcast` and `barrier` are the session's plain operations
  (operations.py). AVG, not SUM and a division by the group's size, is the mean.
* Before the loop there is nobody else. A broadcast (`distribute_tensor` makes one) leaves what it was given: that all
  replicas begin with the same parameters is checked by the coordinator.

Everything else is refused, with what to use. Rejected: groups as large as the number of replicas, as `init_device_mesh`
would make with one world over all of them: that world, and every mesh made from it, ends with the first replica.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ftar_core.errors import FtarError, SettingsError
from ftar_core.training import current

if TYPE_CHECKING:
    from ftar_core.training.session import Session

NAME = "ftar"
DEVICES = ["cpu", "cuda"]

_OTHERWISE = {
    "allgather": "replicas hold the same after each step; for values of your own, all_reduce a tensor with a row each",
    "reduce_scatter": "shard inside of a replica, over another dimension of the mesh",
    "alltoall": "exchange tokens inside of a replica, over another dimension of the mesh",
    "reduce": "use all_reduce: every replica may be the one that goes on",
    "gather": "use all_reduce of a tensor with a row for each replica",
    "scatter": "use broadcast, and take your part",
    "send": "replicas do not talk in pairs: use all_reduce or broadcast",
    "recv": "replicas do not talk in pairs: use all_reduce or broadcast",
}
_REFUSED = {  # method of ProcessGroup -> the operation as its user knows it
    "allgather": "allgather",
    "_allgather_base": "allgather",
    "all_gather_single": "allgather",
    "allgather_coalesced": "allgather",
    "allgather_into_tensor_coalesced": "allgather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "alltoall",
    "alltoall_base": "alltoall",
    "all_to_all_single": "alltoall",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}


class _Done(dist.Work):
    """What is complete already."""

    def __init__(self, result: object) -> None:
        super().__init__()
        self._future: torch.futures.Future[object] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class ReplicateGroup(dist.ProcessGroup):
    """Of this rank and its namesakes in the other replicas; of size 1 to torch. All operations are complete when they
    return. Raises FtarError for what it does not do, as the session's own operations do."""

    def __init__(self, session: Session | None = None) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._bound = weakref.ref(session) if session is not None else None

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> Any:  # the base class asks a backend in C++, which this group has not
        return distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if torch._C._current_graph_task_id() != -1:
            return _Done(list(tensors))  # gradients: see above
        op = getattr(opts, "reduceOp", opts)
        names = {dist.ReduceOp.AVG: "mean", dist.ReduceOp.SUM: "sum"}
        name = next((text for known, text in names.items() if op is None or op == known), None)
        if name is None:
            raise FtarError(f"all_reduce of the replicate dimension with {op}", hint="use ReduceOp.AVG or ReduceOp.SUM")
        if op is None:
            name = "sum"
        self._put(tensors, self._session("all_reduce").allreduce(list(tensors), name))
        return _Done(list(tensors))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def broadcast(  # type: ignore[override]
        self, tensors: Sequence[torch.Tensor], opts: Any = None, *_: object
    ) -> dist.Work:
        """From the first contributor that has a batch (all are rank 0 of this group)."""
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        session = self._look()
        if session is not None and session.started:
            self._put(tensors, [session.broadcast(tensor) for tensor in tensors])
        return _Done(list(tensors))

    def barrier(self, opts: Any = None) -> dist.Work:
        self._session("barrier").barrier()
        return _Done(None)

    def _look(self) -> Session | None:
        return self._bound() if self._bound is not None else current.session()

    def _session(self, operation: str) -> Session:
        session = self._look()
        if session is None or not session.started:
            raise FtarError(
                f"{operation} of the replicate dimension before the training loop: there is nobody else yet",
                hint="call it in a turn of the loop, before session.step()",
            )
        return session

    @staticmethod
    def _put(tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for tensor, result in zip(tensors, results, strict=True):
                tensor.copy_(result)


def _refusing(operation: str) -> Callable[..., None]:
    def refuse(self: ReplicateGroup, *_: object, **__: object) -> None:
        raise FtarError(
            f"{operation} over the replicate dimension of the mesh is not possible: its size changes while training "
            "runs",
            hint=_OTHERWISE[operation],
        )

    return refuse


for _method, _operation in _REFUSED.items():
    setattr(ReplicateGroup, _method, _refusing(_operation))


def _create(store: object, rank: int, size: int, timeout: object) -> ReplicateGroup:
    if size != 1:
        raise SettingsError(
            f"a group of backend {NAME} with {size} ranks: replicas are no ranks of one world of torch",
            hint="one world (torchrun) a replica, and a mesh of shape (1, ranks of the replica), its first dimension "
            f'with backend_override={{"replicate": "{NAME}"}}',
        )
    return ReplicateGroup()


def register_backend() -> None:
    """Make backend `ftar` known to torch.distributed, before a mesh is made with it. Twice does no harm."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, devices=DEVICES)


def process_group() -> dist.ProcessGroup:
    """A group for `DeviceMesh.from_group`, for a mesh that is put together from groups made before. The default process
    group (of this replica's ranks) must be there."""
    register_backend()
    if not dist.is_initialized():
        raise FtarError("there is no default process group", hint="call torch.distributed.init_process_group first")
    group: Any = dist.new_group([dist.get_rank()], backend=NAME, use_local_synchronization=True)
    return group  # type: ignore[no-any-return]
