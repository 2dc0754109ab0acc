"""Who may do what: bearer tokens, each of a principal with a role.

The file is YAML, a list of {principal, role, token}, readable by its owner only (ssh treats its keys the same way): a
secret that others can read is none, so the agent does not start with one. Tokens are compared by their SHA-256, all of
them, in constant time: how long a refusal takes tells nothing about how much of a guess was right.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from agents.api.words import Role

MIN_TOKEN = 16  # 16 random hexadecimal digits are 64 bits: nothing that can be guessed over a network
MAX_BYTES = 1 << 20
LOOK_S = 1.0  # how often the file is looked at
KEYS = {"principal", "role", "token"}


class TokensProblem(Exception):
    """The file cannot be used; the message names it, the reason and the remedy."""


@dataclass(frozen=True)
class Principal:
    name: str
    role: Role


class Tokens:
    def __init__(self, known: dict[bytes, Principal]) -> None:
        """`known`: SHA-256 of the token -> principal."""
        self._known = known

    def whose(self, token: str) -> Principal | None:
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        found: Principal | None = None
        for known, principal in self._known.items():
            if hmac.compare_digest(known, digest):
                found = principal
        return found


class TokenFile(Tokens):
    """A file that is read again when it has changed, so that a token is added or taken away without a restart. While
    it cannot be used, those of before count: an agent that hears nobody could not be told to take a fault back."""

    def __init__(
        self, path: Path, known: Tokens, tell: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`known`: what was read at the start; `tell`: kind and reason of an event."""
        super().__init__(known._known)
        self._path, self._tell, self._clock = path, tell, clock
        self._mark: object = None
        self._looked_s = float("-inf")
        self._lock = threading.Lock()

    def whose(self, token: str) -> Principal | None:
        with self._lock:
            self._look()
        return super().whose(token)

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        mark = _mark(self._path)
        if mark == self._mark:
            return
        try:
            known = load(self._path)._known
        except TokensProblem as error:
            self._tell("tokens.failed", f"{error}; the tokens of before count")
        else:
            if known != self._known:
                self._tell("tokens.changed", f"{self._path}: {len(known)} tokens count from now on")
            self._known = known
        self._mark = mark


def _mark(path: Path) -> object:
    """Another one when the file is another one."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_mode, found.st_uid


def load(path: Path) -> Tokens:
    """Raises TokensProblem."""
    data = _parse(path, _read(path))
    if not isinstance(data, list) or not data:
        raise TokensProblem(f"{path}: a list of {{principal, role, token}} is expected, with at least one")
    known: dict[bytes, Principal] = {}
    for number, item in enumerate(data, 1):
        digest, principal = _entry(path, number, item)
        if digest in known:
            raise TokensProblem(f"{path}: entry {number} has the same token as {known[digest].name}")
        known[digest] = principal
    return Tokens(known)


def _read(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TokensProblem(f"{path}: {error.strerror}") from None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise TokensProblem(f"{path}: not a regular file")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise TokensProblem(f"{path}: others may read or write it (mode {mode:04o}); run: chmod 600 {path}")
        if status.st_uid != os.geteuid():
            raise TokensProblem(f"{path}: belongs to user {status.st_uid}, not to the agent's user {os.geteuid()}")
        return file.read(MAX_BYTES)


def _parse(path: Path, raw: bytes) -> Any:
    try:
        return YAML(typ="safe").load(raw.decode("utf-8"))
    except (YAMLError, UnicodeDecodeError, ValueError):
        # Not the parser's own words: they quote the line, and the line is a secret.
        raise TokensProblem(f"{path}: not YAML") from None


def _entry(path: Path, number: int, item: Any) -> tuple[bytes, Principal]:
    if not isinstance(item, dict) or set(item) != KEYS or not all(isinstance(v, str) and v for v in item.values()):
        raise TokensProblem(f"{path}: entry {number}: exactly principal, role and token are expected, all texts")
    if item["role"] not in [role.value for role in Role]:
        roles = ", ".join(role.value for role in Role)
        raise TokensProblem(f"{path}: entry {number}: role {item['role']!r} is none of {roles}")
    if len(item["token"]) < MIN_TOKEN:
        raise TokensProblem(f"{path}: entry {number}: the token has fewer than {MIN_TOKEN} characters")
    return hashlib.sha256(item["token"].encode()).digest(), Principal(item["principal"], Role(item["role"]))
