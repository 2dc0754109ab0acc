"""Lines of ours in the kernel log (/dev/kmsg; the kernel's Documentation/ABI/testing/dev-kmsg).

The kernel marks what user space writes there as such (facility 1, user), but other health daemons of the node match the
text only and act on it: that is what it is for here.
"""

from __future__ import annotations

import os
from pathlib import Path

from agents.host.errors import HostError

MAX_BYTES = 900  # the kernel refuses lines above 1024 less its own prefix (printk's LOG_LINE_MAX)
WARNING = b"<12>"  # facility user, level warning


class KernelLine:
    """`path` None: this machine's kernel log is not to be written to."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def why_not(self) -> str:
        """Why no line can be written; empty if one can."""
        if self._path is None:
            return "its agent may not write to the kernel log (kmsg_device in its configuration)"
        if not self._path.exists():
            return f"there is no {self._path}"
        return "" if os.access(self._path, os.W_OK) else f"no right to write to {self._path} (it takes root)"

    def write(self, text: str) -> None:
        """One line, in one piece. Raises HostError."""
        if self._path is None:
            raise HostError("write to the kernel log", 0, self.why_not())
        line = WARNING + " ".join(text.split()).encode()[:MAX_BYTES] + b"\n"
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError as error:
            raise HostError.of(f"write to {self._path}", error) from None
