"""NCCL over links that survive the loss of a rail: call `enable()` before the process group is made; that is all.

    import ftar_core.nccl
    ftar_core.nccl.enable(rails=["ens1f0", "ens2f0"])
    torch.distributed.init_process_group("nccl")

It sets environment variables that NCCL reads when it starts (ncclenv.py says which and why); `ftctl env nccl` prints
them for launch scripts. Torch is not imported.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from ftar_core import ncclenv
from ftar_core.errors import NativeMissing

__all__ = ["enable"]


def enable(
    *,
    rails: str | Sequence[str] | None = None,
    backup: str | Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    token_file: str | os.PathLike[str] | None = None,
    mode: str | None = None,
    allow_sockets: bool = False,
    environ: MutableMapping[str, str] | None = None,
    infiniband: Path = ncclenv.INFINIBAND,
) -> dict[str, str]:
    """Set the environment that makes NCCL use the plugin, and return what was set.

    The arguments are those of `ncclenv.environment`; `environ` stands in for os.environ. Raises SettingsError for
    settings with which NCCL would fall back to another network in silence, and where an RDMA port is active without
    allow_sockets=True; NativeMissing if the plugin is not here or cannot be loaded.
    """
    target = os.environ if environ is None else environ
    plugin = ncclenv.plugin_path()
    wanted = ncclenv.environment(
        plugin=plugin,
        current=target,
        rails=rails,
        backup=backup,
        timeout_s=timeout_s,
        token_file=token_file,
        mode=mode,
        allow_sockets=allow_sockets,
        infiniband=infiniband,
    )
    try:
        ctypes.CDLL(str(plugin), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:  # a missing library, another machine's build: NCCL would only say that there is no plugin
        raise NativeMissing(f"{plugin} cannot be loaded: {error}", hint="run: ftctl doctor") from None
    target.update(wanted)
    return wanted
