"""The helper's one configuration file (YAML): what it may break, and for whom. Unknown keys are errors.

It is root's word, so it counts only if nobody else can have written it: the file and every directory above it belong to
root (or to the helper's own user) and are not writable by others.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path
from typing import Annotated, Any

import msgspec
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from agents.api.protect import MAX_RULES, Protection, pattern_problem
from ftar_core.wire.ids import valid_name

MAX_BYTES = 64 * 1024
User = Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | Annotated[int, msgspec.Meta(ge=0, lt=2**32 - 1)]
Device = Annotated[str, msgspec.Meta(pattern=r"^[^/\s]{1,15}$")]
Pattern = Annotated[str, msgspec.Meta(pattern=r"^/\S*$", max_length=256)]
Absolute = Annotated[str, msgspec.Meta(pattern=r"^/.+")]


Patterns = Annotated[list[str], msgspec.Meta(max_length=MAX_RULES)]


class HelperProblem(Exception):
    """The configuration cannot be used; the message names the file, the key and the reason."""


class Protect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Patterns of what no fault may touch (agents/api/protect.py)."""

    nodes: Patterns = []
    nics: Patterns = []
    replicas: Patterns = []

    def of(self, source: str) -> Protection:
        return Protection(tuple(self.nodes), tuple(self.nics), tuple(self.replicas), source)


class HelperSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`agent_user` is the only one that is heard. Processes of `process_users` may be faulted beside its own; users are
    names or numbers. Faults last `max_duration_s` at most, `max_faults` are in force at a time, and `max_per_minute`
    begin in any minute. `process_cgroups`: patterns of control groups (as /proc/PID/cgroup has them); where some are
    given, a process is faulted only if it is in one of them. `registered_only`: and only if it holds a connection to
    the agent's `ranks_socket`, which is what a rank does; false: whichever process of those users the agent names, and
    who has taken the agent over names what it likes."""

    node: str
    agent_user: User
    socket: Absolute = "/run/ftctl-helper/helper.sock"
    state_dir: Absolute = "/var/lib/ftctl-helper"
    rails: Annotated[list[Device], msgspec.Meta(max_length=64)] = []
    management_nic: Device | None = None
    protect: Protect = Protect()
    process_users: Annotated[list[User], msgspec.Meta(max_length=64)] = []
    registered_only: bool = True
    process_cgroups: Annotated[list[Pattern], msgspec.Meta(max_length=64)] = []
    max_faults: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 4
    max_duration_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 900.0
    max_per_minute: Annotated[int, msgspec.Meta(ge=1, le=6000)] = 120


def load(path: Path) -> HelperSettings:
    """Read and check the file. Raises HelperProblem."""
    data = _yaml(path)
    if not isinstance(data, dict):
        raise HelperProblem(f"{path}: a mapping of settings is expected")
    try:
        settings = msgspec.convert(data, HelperSettings)
    except (msgspec.ValidationError, ValueError) as error:
        raise HelperProblem(f"{path}: {error}") from None
    if problem := _problem(settings):
        raise HelperProblem(f"{path}: {problem}")
    return settings


def uid_of(user: str | int) -> int:
    """Raises HelperProblem."""
    if isinstance(user, int):
        return user
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise HelperProblem(f"there is no user {user} here (agent_user, process_users)") from None


def unsafe(path: Path) -> str:
    """Who but root, or this user, could write there; empty if nobody. Raises OSError."""
    ours = (0, os.geteuid())
    whole = path.resolve(strict=True)
    for one in (whole, *whole.parents):
        found = one.stat()
        sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if found.st_uid not in ours:
            return f"{one} belongs to user {found.st_uid}, not to root"
        if found.st_mode & 0o022 and not sticky:
            return f"{one} can be written by others than root (chmod go-w {one})"
    return ""


def _problem(settings: HelperSettings) -> str:
    if not valid_name(settings.node):
        return f"node: {settings.node!r} is no node name (letters a-z, digits and ._- are)"
    if len(set(settings.rails)) != len(settings.rails):
        return "rails: a rail is named twice"
    if settings.management_nic in settings.rails:
        return f"{settings.management_nic} is named as a rail and as the management NIC"
    for kind in ("nodes", "nics", "replicas"):
        for pattern in getattr(settings.protect, kind):
            if problem := pattern_problem(kind, pattern):
                return f"protect.{kind}: {problem}"
    return ""


def _yaml(path: Path) -> Any:
    try:
        if bad := unsafe(path):
            raise HelperProblem(bad)
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise HelperProblem(f"{path}: longer than {MAX_BYTES} bytes")
        return YAML(typ="safe").load(text.decode())
    except OSError as error:
        raise HelperProblem(f"{path}: {error.strerror}") from None
    except (YAMLError, ValueError) as error:
        raise HelperProblem(f"{path}: not YAML: {' '.join(str(error).split())}") from None
