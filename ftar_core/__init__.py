"""ftar_core: data-parallel training that survives the loss of replicas and of links.

Attributes load on first use, so that `import ftar_core` costs milliseconds and torch is loaded by training code only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftar_core.errors import FtarError as FtarError
    from ftar_core.training.backend import process_group as process_group
    from ftar_core.training.backend import register_backend as register_backend
    from ftar_core.training.checkpoints.options import Checkpoint as Checkpoint
    from ftar_core.training.clipping import clip_grad_norm_ as clip_grad_norm_
    from ftar_core.training.data import BatchSampler as BatchSampler
    from ftar_core.training.session import Session as Session
    from ftar_core.training.stream import Stream as Stream

__version__ = "0.1.0"

_LAZY = {
    "BatchSampler": "ftar_core.training.data",
    "Checkpoint": "ftar_core.training.checkpoints.options",
    "FtarError": "ftar_core.errors",
    "Session": "ftar_core.training.session",
    "clip_grad_norm_": "ftar_core.training.clipping",
    "process_group": "ftar_core.training.backend",
    "register_backend": "ftar_core.training.backend",
    "Stream": "ftar_core.training.stream",
}
__all__ = [
    "BatchSampler",
    "Checkpoint",
    "FtarError",
    "Session",
    "Stream",
    "__version__",
    "clip_grad_norm_",
    "process_group",
    "register_backend",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ftar_core' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
