"""The one error of everything that touches the machine."""

from __future__ import annotations

import errno as errno_names
import os


class HostError(Exception):
    """An operation on the host failed.

    `operation` is what was tried, in words an operator knows ("set rail0 up"), `errno` the kernel's number (0: none),
    `text` the kernel's own words if it gave any (NLMSGERR_ATTR_MSG, netlink(7)). Definite: the kernel refused.
    """

    def __init__(self, operation: str, errno: int = 0, text: str = "") -> None:
        self.operation = operation
        self.errno = errno
        self.text = text or (os.strerror(errno) if errno else "no reason given")
        super().__init__(f"{operation}: {self.text}")

    @property
    def name(self) -> str:
        """The symbolic name of the number, "EPERM"; empty when there is none."""
        return errno_names.errorcode.get(self.errno, "")

    @classmethod
    def of(cls, operation: str, error: OSError) -> HostError:
        return cls(operation, error.errno or 0, error.strerror or str(error))
