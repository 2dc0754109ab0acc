"""One archive for an incident report: written as it is gathered, bounded, without secrets, whole or not at all.

    ftctl-bundle-main-20261130T071500Z/status.json, events.jsonl, nodes/node1/links.json, ..., manifest.json

The manifest comes last, because it has the digest of every file; it also says what could not be read, and why.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_FILE_BYTES = 16 * 1024 * 1024
MAX_BYTES = 256 * 1024 * 1024  # of all files before compression
LEFT_OUT = "[left out]"

_PATTERNS = (
    # A value behind a key that says it is one, in JSON, YAML, a header or an environment.
    re.compile(
        r"(?i)((?:\b|_)(?:token|secret|password|passwd|api[_-]?key|access[_-]?key|authorization)\"?\s*[:=]\s*\"?(?:bearer\s+)?)"
        r"(?!bearer\s)([^\s\",;}{\[\]]{6,})"
    ),
    re.compile(r"(?i)(\bbearer\s+)([A-Za-z0-9._~+/=-]{8,})"),
    re.compile(r"()(-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z))", re.DOTALL),
)


@dataclass(frozen=True)
class Packed:
    """`source`: who said it. `left_out`: how many secrets were taken out of it."""

    name: str
    source: str
    bytes: int
    sha256: str
    left_out: int = 0


@dataclass(frozen=True)
class Missing:
    what: str
    source: str
    reason: str


def without_secrets(text: str, known: Iterable[str]) -> tuple[str, int]:
    """`known`: secrets that are to be found wherever they stand. The text without any, and how many there were."""
    count = 0
    for secret in known:
        if len(secret) >= 6:  # a shorter one would take half of the text with it
            count += text.count(secret)
            text = text.replace(secret, LEFT_OUT)
    for pattern in _PATTERNS:
        text, found = pattern.subn(lambda match: match[1] + LEFT_OUT, text)
        count += found
    return text, count


class Bundle:
    """Files are added in the order of their worth: what is over the bound is left out, and said so."""

    def __init__(self, archive: tarfile.TarFile, root: str, secrets: Iterable[str], now: float, limit: int) -> None:
        self._archive = archive
        self._root = root
        self._secrets = tuple(secrets)
        self._now = now
        self._left = limit
        self.packed: list[Packed] = []
        self.missing: list[Missing] = []

    def add(self, name: str, source: str, text: str) -> None:
        clean, left_out = without_secrets(text, self._secrets)
        data = clean.encode("utf-8", "replace")
        if len(data) > MAX_FILE_BYTES:
            self.miss(name, source, f"{len(data)} bytes; a file may have {MAX_FILE_BYTES}")
        elif len(data) > self._left:
            self.miss(name, source, f"{len(data)} bytes; the bundle has room for {self._left} more")
        else:
            self._left -= len(data)
            self._write(name, data)
            self.packed.append(Packed(name, source, len(data), hashlib.sha256(data).hexdigest(), left_out))

    def miss(self, what: str, source: str, reason: str) -> None:
        clean, _ = without_secrets(reason, self._secrets)
        self.missing.append(Missing(what, source, clean))

    def finish(self, about: dict[str, object]) -> None:
        manifest = {
            "schema": 1,
            **about,
            "files": [asdict(one) for one in self.packed],
            "missing": [asdict(one) for one in self.missing],
        }
        clean, _ = without_secrets(json.dumps(manifest, indent=1), self._secrets)
        self._write("manifest.json", clean.encode())

    def _write(self, name: str, data: bytes) -> None:
        entry = tarfile.TarInfo(f"{self._root}/{name}")
        entry.size, entry.mtime, entry.mode = len(data), int(self._now), 0o600
        self._archive.addfile(entry, io.BytesIO(data))


@contextlib.contextmanager
def opened(path: Path, root: str, *, secrets: Iterable[str], now: float, limit: int = MAX_BYTES) -> Iterator[Bundle]:
    """The archive stands at `path` when the block has ended well; else nothing does. Raises OSError; FileExistsError
    where there is one already."""
    if path.exists():
        raise FileExistsError(17, "it is there already", str(path))
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive:
                yield Bundle(archive, root, secrets, now, limit)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(part, path)  # unlike a rename, it does not replace what somebody else wrote meanwhile
        except PermissionError:  # a file system without links
            os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
