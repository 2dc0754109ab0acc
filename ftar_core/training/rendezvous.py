"""How the ranks of a replica find their leader: through torch's own key-value store, in which rank 0 writes an address.

The store is that of the default process group, which every sharded replica has, or else a TCPStore at MASTER_ADDR and
MASTER_PORT. Only bytes go in and out, nothing is pickled, and nothing in it is believed: who listens at that address
has to prove the job token (runtime/assembly.py).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ftar_core.errors import NotAssembled, SettingsError
from ftar_core.runtime.assembly import ASSEMBLE_S
from ftar_core.runtime.settings import Settings
from ftar_core.wire.address import Address, parse_address

MAX_BYTES = 512
_OF = "ftar/replica"  # whose rank 0 it is
_kept: list[Any] = []  # the store that rank 0 serves lives as long as this process


def publish(settings: Settings, address: Address) -> None:
    """Tell the other ranks where rank 0 listens. Raises SettingsError, NotAssembled."""
    if settings.leader is not None:
        return
    try:
        store = _store(settings)
        store.set(_OF, settings.replica.encode())
        store.set(_key(settings), str(address).encode())
    except (RuntimeError, ValueError) as error:
        raise _trouble(settings, error) from None


def find(settings: Settings) -> Address:
    """The leader's address; waits until it is known. Raises SettingsError, NotAssembled."""
    if settings.leader is not None:
        return settings.leader
    try:
        store = _store(settings)
        store.wait([_OF], timedelta(seconds=ASSEMBLE_S))
        first = bytes(store.get(_OF)[:MAX_BYTES]).decode()
        if first != settings.replica:
            raise SettingsError(
                f"rank 0 of this process group is of replica {first}, rank {settings.rank} of {settings.replica}",
                hint="the ranks of one replica are one torchrun: start another, with another port, for each replica",
            )
        store.wait([_key(settings)], timedelta(seconds=ASSEMBLE_S))
        text = store.get(_key(settings))
        return parse_address(bytes(text[:MAX_BYTES]).decode())
    except (RuntimeError, ValueError) as error:
        raise _trouble(settings, error) from None


def _key(settings: Settings) -> str:
    return f"ftar/{settings.job}/{settings.replica}/leader"


def _store(settings: Settings) -> Any:
    """Raises SettingsError, RuntimeError."""
    if dist.is_available() and dist.is_initialized():
        ranks = (dist.get_rank(), dist.get_world_size())
        if ranks != (settings.rank, settings.world_size):
            raise SettingsError(
                f"RANK={settings.rank} and WORLD_SIZE={settings.world_size}, but the default process group says rank "
                f"{ranks[0]} of {ranks[1]}",
                hint="the default process group must span the ranks of one replica, and no more",
            )
        return distributed_c10d._get_default_store()
    if settings.master is None:
        raise SettingsError(
            f"WORLD_SIZE={settings.world_size}, but the ranks cannot find each other: MASTER_ADDR and MASTER_PORT are "
            "not set, and there is no process group",
            hint="start the ranks of a replica with torchrun, or call init_process_group before the session is made",
        )
    store = dist.TCPStore(  # type: ignore[attr-defined]
        settings.master.host,
        settings.master.port,
        settings.world_size,
        settings.rank == 0,
        timeout=timedelta(seconds=ASSEMBLE_S),
        wait_for_workers=False,
    )
    _kept.append(store)
    return store


def _trouble(settings: Settings, error: Exception) -> NotAssembled:
    """Mostly rank 0 has ended meanwhile. Where a replica is on several nodes, a rank of its next life may also have met
    the store of the last one, whose rank 0 was about to end: the next try meets the new one."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return NotAssembled(
        f"rank {settings.rank} of {settings.replica} cannot find its leader through torch's store: {text}",
        hint="look at the log of rank 0, and check MASTER_ADDR and MASTER_PORT",
    )
