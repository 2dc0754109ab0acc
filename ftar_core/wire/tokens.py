"""Token files: the shared secret of a job, or of its operators. One line of text, readable by its owner only.

A secret that other users of the machine can read is none, so such a file is refused (as ssh does with its keys) rather
than warned about: a warning in a log that nobody reads is the same as silence.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ftar_core.errors import SettingsError

MIN_BYTES = 16  # 16 random hexadecimal digits are 64 bits; an HMAC cannot be guessed off line from less work than that
MAX_BYTES = 4096


def read_token(path: Path, what: str = "token file") -> bytes:
    """The token in `path`, without white space around it. `what` names the setting in errors. Raises SettingsError."""
    remake = f"make one with: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        hint = remake if isinstance(error, FileNotFoundError) else f"look at: ls -l {path}"
        raise SettingsError(f"{what} {path}: {error.strerror}", hint=hint) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SettingsError(f"{what} {path}: not a regular file", hint=remake)
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise SettingsError(
                f"{what} {path}: other users may read or write it (mode {mode:04o})", hint=f"run: chmod 600 {path}"
            )
        token = os.read(descriptor, MAX_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{what} {path}: {error.strerror}", hint=f"look at: ls -l {path}") from None
    finally:
        os.close(descriptor)
    if len(token) > MAX_BYTES:
        raise SettingsError(f"{what} {path}: longer than {MAX_BYTES} bytes, so it is no token", hint=remake)
    token = token.strip()
    if len(token) < MIN_BYTES:
        raise SettingsError(f"{what} {path}: {len(token)} bytes, at least {MIN_BYTES} are needed", hint=remake)
    return token
