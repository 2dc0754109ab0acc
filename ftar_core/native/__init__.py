"""The native core: links that survive the loss of a rail, the ring all-reduce, heartbeats. Linux only."""

from __future__ import annotations

from ftar_core.errors import NativeMissing

try:
    from ftar_core.native import _core as core
except ImportError as error:  # a client install, or a build for another interpreter
    _reason = str(error)

    def require() -> None:
        raise NativeMissing(
            f"ftar_core's native core cannot be loaded: {_reason}", hint="install ftctl on Linux with a C++20 compiler"
        )
else:

    def require() -> None:
        return None


__all__ = ["core", "require"]
