"""Where ftctl finds the agents and how it may talk to them.

flags > environment > ./ftctl.yaml > the user's ftctl.yaml > the only running lab. An inventory looks like this:

    version: 1
    job: main
    environment: staging              # what playbooks may run here; optional
    token_file: operator.token        # one line, mode 0600; relative paths are relative to this file
    ca_file: ca.pem                   # for https; the system's authorities otherwise
    nodes:
      - {name: node0, url: "unix:///run/ftctl/node0/agent.sock"}
      - {name: node1, url: "https://10.0.0.2:7610"}

ftctl.yaml is an inventory too, or names one (`inventory: FILE`), and may set `output` and `timeout`. A token file
belongs to the inventory it stands in, or to the ftctl.yaml that names it: a user's own file never lends its token to
other nodes. Plain http is refused off loopback, because the token would travel in clear text.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agents.api.models import DEFAULT_PORT
from ftar_core.errors import SettingsError
from ftar_core.wire.ids import valid_name
from ftar_core.wire.tokens import read_token
from ftctl import durations, nearest
from ftctl.context import World
from ftctl.errors import UsageProblem
from ftctl.options import OutputFormat
from ftctl.yamlfile import line_of, read_tree

MAX_FILE_BYTES = 4 * 1024 * 1024  # an inventory of 10,000 nodes is 0.7 MB
MAX_SOCKET_PATH = 107  # sun_path holds 108 bytes with the final zero, unix(7)
DEFAULT_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Flags:
    """What the command line says; None where it says nothing."""

    inventory: Path | None = None
    lab: str | None = None
    token_file: Path | None = None
    timeout: str | None = None
    output: OutputFormat | None = None


@dataclass(frozen=True)
class Node:
    """An agent's address. With `socket`, HTTP goes over that Unix socket and `base_url` is a formality."""

    name: str
    url: str
    base_url: str
    socket: Path | None = None


@dataclass(frozen=True)
class Inventory:
    """`source` says where it came from, for messages."""

    source: str
    job: str
    nodes: tuple[Node, ...]
    token: str = field(repr=False)
    ca_file: Path | None = None
    environment: str = ""  # lab, staging, production ...: playbooks say where they may run

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    def node(self, name: str) -> Node:
        """The node of this name. Raises UsageProblem."""
        if name in self._by_name:
            return self._by_name[name]
        every = [node.name for node in self.nodes]
        near = nearest.names(name, every)
        known = f"nearest: {', '.join(near)}" if near else f"it has {_some(every)}"
        raise UsageProblem(f"node {name}", f"not in the inventory {self.source} ({known})", "ftctl status")


@dataclass(frozen=True)
class Settings:
    inventory: Inventory
    output: OutputFormat
    timeout_s: float


class _NodeEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    url: str


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    version: Literal[1]
    inventory: Path | None = None
    job: str | None = None
    environment: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None
    output: OutputFormat | None = None
    timeout: str | None = None
    nodes: list[_NodeEntry] | None = Field(default=None, min_length=1)


class _Loaded(NamedTuple):
    """A file that was read, with the YAML tree that knows its line numbers."""

    path: Path
    content: _File
    tree: Any

    def relative(self, path: Path) -> Path:
        return (self.path.parent / path.expanduser()).resolve()

    def problem(self, reason: str, *where: str | int) -> UsageProblem:
        return UsageProblem(f"{self.path}:{line_of(self.tree, where)}", reason)


def load(world: World, flags: Flags) -> Settings:
    """Everything a command needs to reach the agents. Raises UsageProblem."""
    environ = world.environ
    files = [
        loaded
        for path in (world.cwd / "ftctl.yaml", world.user_config())
        if (loaded := _read_if_there(path)) is not None
    ]
    return Settings(
        inventory=_inventory(world, flags, files),
        output=_output(flags, environ.get("FTCTL_OUTPUT"), files),
        timeout_s=_timeout(flags, environ.get("FTCTL_TIMEOUT"), files),
    )


def output_only(world: World, flag: OutputFormat | None) -> OutputFormat:
    """The output format of a command that needs no agents."""
    return _output(Flags(output=flag), world.environ.get("FTCTL_OUTPUT"), [])


# --- which inventory -------------------------------------------------------------------------------------------------


def _inventory(world: World, flags: Flags, files: list[_Loaded]) -> Inventory:
    environ = world.environ
    token_file = flags.token_file or _path(world, environ.get("FTCTL_TOKEN_FILE"))
    if flags.inventory and flags.lab:
        raise UsageProblem("--inventory and --lab", "only one of the two can say which cluster is meant")
    if flags.inventory:
        return _build(_read(world.cwd / flags.inventory.expanduser()), token_file)
    lab = flags.lab
    if lab is None:
        if path := _path(world, environ.get("FTCTL_INVENTORY")):
            return _build(_read(path), token_file)
        lab = environ.get("FTCTL_LAB")
    if lab is None:
        for loaded in files:
            if loaded.content.inventory is not None:
                own = loaded.content.token_file
                target = _read(loaded.relative(loaded.content.inventory))
                return _build(target, token_file or (loaded.relative(own) if own else None))
            if loaded.content.nodes is not None:
                return _build(loaded, token_file)
    return _lab_inventory(world, lab, token_file)


def _lab_inventory(world: World, wanted: str | None, token_file: Path | None) -> Inventory:
    labs = world.running_labs()
    names = ", ".join(lab.name for lab in labs)
    if wanted is not None:
        chosen = [lab for lab in labs if lab.name == wanted]
        if not chosen:
            raise UsageProblem(
                f"lab {wanted}",
                f"not running ({names} is)" if labs else "not running, nor is any other",
                "ftctl lab up",
            )
    else:
        chosen = labs
        if not labs:
            raise UsageProblem(
                "inventory",
                f"none is given, neither {world.cwd / 'ftctl.yaml'} nor {world.user_config()} has one,"
                " and no lab is running on this machine",
                "ftctl lab up   or   ftctl COMMAND --inventory FILE",
            )
        if len(labs) > 1:
            raise UsageProblem(
                "inventory", f"several labs are running: {names}", f"say which one: --lab {labs[0].name}"
            )
    return _build(_read(chosen[0].inventory), token_file)


def _build(loaded: _Loaded, token_file: Path | None) -> Inventory:
    content = loaded.content
    if content.nodes is None:
        raise loaded.problem("an inventory needs `nodes`")
    if content.job is None:
        raise loaded.problem("an inventory needs `job`, the name of the training job")
    if not valid_name(content.job):
        raise loaded.problem(f"{content.job!r} cannot be a job's name (1 to 63 of a-z 0-9 . _ -)", "job")
    nodes: dict[str, Node] = {}
    for index, entry in enumerate(content.nodes):
        if not valid_name(entry.name):
            raise loaded.problem(
                f"{entry.name!r} cannot be a node's name (1 to 63 of a-z 0-9 . _ -)", "nodes", index, "name"
            )
        if entry.name in nodes:
            raise loaded.problem(f"node {entry.name} is named twice", "nodes", index, "name")
        try:
            nodes[entry.name] = parse_node(entry.name, entry.url, loaded.path.parent)
        except ValueError as error:
            raise loaded.problem(str(error), "nodes", index, "url") from None
    token_path = token_file or (loaded.relative(content.token_file) if content.token_file else None)
    if token_path is None:
        raise loaded.problem("an inventory needs `token_file` (or give --token-file)")
    ca_file = loaded.relative(content.ca_file) if content.ca_file else None
    if ca_file is not None and not ca_file.is_file():
        raise loaded.problem(f"ca_file {ca_file} is not there", "ca_file")
    environment = content.environment or ""
    if environment and not valid_name(environment):
        raise loaded.problem(
            f"{environment!r} cannot be an environment's name (1 to 63 of a-z 0-9 . _ -)", "environment"
        )
    return Inventory(str(loaded.path), content.job, tuple(nodes.values()), _token(token_path), ca_file, environment)


def parse_node(name: str, url: str, relative_to: Path) -> Node:
    """An agent's URL: unix://PATH, https://HOST[:7610] or http://LOOPBACK[:7610]. Raises ValueError with the reason."""
    if url.startswith("unix://"):
        path = relative_to / Path(url.removeprefix("unix://")).expanduser()
        if len(str(path).encode()) > MAX_SOCKET_PATH:
            raise ValueError(f"the path of the socket is longer than {MAX_SOCKET_PATH} bytes: {path}")
        return Node(name, url, f"http://{name}", path)
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
        parts.netloc.encode("idna")
    except ValueError as error:
        raise ValueError(f"{url!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"{url!r} is none of unix://PATH, https://HOST:{DEFAULT_PORT}, http://127.0.0.1:{DEFAULT_PORT}"
        )
    if parts.username is not None or parts.query or parts.fragment or parts.path not in ("", "/"):
        raise ValueError(f"{url!r}: only a host and a port are expected")
    if parts.scheme == "http" and not _loopback(parts.hostname):
        raise ValueError(f"{url}: plain http is refused off loopback (the token would be readable): use https")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Node(name, url, f"{parts.scheme}://{host}:{port}")


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token(path: Path) -> str:
    try:
        token = read_token(path, "token file")
    except SettingsError as error:
        raise UsageProblem("", str(error), error.hint) from None
    try:
        text = token.decode("ascii")
    except UnicodeDecodeError:
        text = ""
    if not re.fullmatch(r"[\x21-\x7e]+", text):
        raise UsageProblem(f"token file {path}", "a token is one line of visible ASCII characters")
    return text


# --- the small settings ----------------------------------------------------------------------------------------------


def _output(flags: Flags, variable: str | None, files: list[_Loaded]) -> OutputFormat:
    if flags.output is not None:
        return flags.output
    if variable:
        try:
            return OutputFormat(variable)
        except ValueError:
            choices = ", ".join(choice.value for choice in OutputFormat)
            raise UsageProblem("FTCTL_OUTPUT", f"{variable!r} is none of {choices}") from None
    return next((f.content.output for f in files if f.content.output is not None), OutputFormat.TABLE)


def _timeout(flags: Flags, variable: str | None, files: list[_Loaded]) -> float:
    if flags.timeout:
        return _seconds("--timeout", flags.timeout)
    if variable:
        return _seconds("FTCTL_TIMEOUT", variable)
    for loaded in files:
        if loaded.content.timeout is not None:
            return _seconds(str(loaded.problem("", "timeout").thing), loaded.content.timeout)
    return DEFAULT_TIMEOUT_S


def _seconds(thing: str, text: str) -> float:
    try:
        seconds = durations.parse(text)
    except durations.DurationError as error:
        raise UsageProblem(thing, str(error)) from None
    if seconds <= 0:
        raise UsageProblem(thing, f"{text} leaves the agents no time to answer")
    return seconds


def _path(world: World, text: str | None) -> Path | None:
    return world.cwd / Path(text).expanduser() if text else None


# --- reading YAML ----------------------------------------------------------------------------------------------------


def _read_if_there(path: Path) -> _Loaded | None:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageProblem(str(path), error.strerror or str(error)) from None
    return _read(path)


def _read(path: Path) -> _Loaded:
    tree = read_tree(path, max_bytes=MAX_FILE_BYTES, what="inventory")
    try:
        return _Loaded(path, _File.model_validate(tree), tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = first["loc"]
        name = ".".join(str(part) for part in where)
        known = ", ".join(_File.model_fields if len(where) == 1 else _NodeEntry.model_fields)
        reason = {
            "extra_forbidden": f"unknown key `{name}` (known: {known})",
            "missing": f"`{name}` is missing",
        }.get(first["type"], f"`{name}`: {first['msg'][:1].lower()}{first['msg'][1:]}")
        raise UsageProblem(f"{path}:{line_of(tree, where)}", reason) from None


def _some(names: Any, limit: int = 8) -> str:
    every = list(names)
    return ", ".join(every[:limit]) + (f" and {len(every) - limit} more" if len(every) > limit else "")
