"""Every error that ftar_core raises on purpose.

FtarError
├── SettingsError          definite    a setting or environment variable is missing or wrong
├── NotAssembled           definite    the ranks of this replica did not come together: they are to be started again
├── WireError              definite    bytes from the network are not a message of ours (the connection is dropped)
├── AuthError              definite    the other side does not know the job token
├── ProtocolRefused        definite    the coordinator or a member refused this one, with its reason
├── StoreError             definite    the coordinator's record could not be read or written
│   └── FencedError        definite    a newer coordinator owns the store: this one must exit
├── PlanMismatch           definite    this model's bucket plan is not the job's
├── StateMismatch          definite    a fetched state does not fit this model
├── CheckpointError        definite    a checkpoint cannot be loaded, or its directory not be used
├── NonFiniteGradients     definite    gradients were not finite and the job was told to fail then: nobody updated
└── NativeMissing          definite    the native core is not built for this interpreter

"definite": it surely did not happen. "indefinite": it may have.
"""

from __future__ import annotations


class FtarError(Exception):
    """Base. `hint` is the next thing the user can do, in one sentence (may be empty)."""

    definite = True

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:  # a traceback shows notes below the message (Python 3.11 and later)
            self.__notes__ = [f"next: {hint}"]


class SettingsError(FtarError):
    pass


class NotAssembled(FtarError):
    pass


class WireError(FtarError):
    pass


class AuthError(FtarError):
    pass


class ProtocolRefused(FtarError):
    pass


class StoreError(FtarError):
    pass


class FencedError(StoreError):
    pass


class PlanMismatch(FtarError):
    pass


class StateMismatch(FtarError):
    pass


class CheckpointError(FtarError):
    pass


class NonFiniteGradients(FtarError):
    pass


class NativeMissing(FtarError):
    pass
