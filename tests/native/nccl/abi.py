"""The plugin's interface as NCCL uses it: ftar_core.ncclabi."""

from ftar_core.ncclabi import (
    ARGUMENT,
    HANDLE_BYTES,
    INTERNAL,
    PROPERTIES,
    REMOTE,
    SUCCESS,
    SYSTEM,
    USAGE,
    VERSIONS,
    Plugin,
    PluginError,
    pair,
)

__all__ = [
    "ARGUMENT",
    "HANDLE_BYTES",
    "INTERNAL",
    "PROPERTIES",
    "REMOTE",
    "SUCCESS",
    "SYSTEM",
    "USAGE",
    "VERSIONS",
    "Plugin",
    "PluginError",
    "pair",
]
