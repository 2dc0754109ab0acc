"""`ft-agent-helper`: started by root, beside an agent that has no rights of its own.

It binds its socket, gives up all capabilities but those that the configured faults need, takes back what a
predecessor left, and then answers. On SIGTERM or SIGINT the faults go first. Exit codes: 0 ended as asked; 1 something
failed; 2 the configuration cannot be used; 5 a fault may still be in force (its watchdog goes on).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from functools import partial
from pathlib import Path

from agents.helper import settings as configuration
from agents.helper.announced import Announced
from agents.helper.audit import HelperAudit
from agents.helper.server import HelperServer
from agents.helper.service import Service
from agents.helper.settings import HelperProblem, HelperSettings, uid_of
from agents.host.capabilities import CAP_KILL, CAP_NET_ADMIN, keep_only, words
from agents.host.errors import HostError
from agents.host.machine import Machine
from agents.host.pidfile import Taken, only_one
from agents.host.readiness import Readiness
from agents.host.signals import let_through
from agents.injection.deadlines import Deadlines
from agents.injection.guard import Limits
from agents.injection.kennel import Kennel
from agents.injection.layout import ledger_directory, scratch_directory
from agents.injection.ledger import Ledger, LedgerError

FAILED, USAGE, IN_FORCE = 1, 2, 5


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="ft-agent-helper",
        description="Holds the rights that faults need, for an ft-agent without root, and takes every fault back.",
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="what may be faulted (YAML, root's)")
    parser.add_argument("--check", action="store_true", help="read the configuration, say what it allows, and end")
    options = parser.parse_args()
    os.umask(0o077)
    try:
        settings = configuration.load(options.config)
        agent_uid = uid_of(settings.agent_user)
        users = frozenset({agent_uid, *(uid_of(user) for user in settings.process_users)})
        if options.check:
            print(_summary(settings))
            sys.exit(0)
        with only_one(Path(settings.state_dir) / "helper.pid"):
            sys.exit(_run(settings, options.config, agent_uid, users))
    except HelperProblem as error:
        _fail(str(error), USAGE)
    except Taken as taken:
        _fail(f"state_dir {settings.state_dir}: {taken.why('helper')}", FAILED)
    except LedgerError as error:
        _fail(f"the ledger of faults cannot be used: {error}", FAILED)
    except HostError as error:
        _fail(str(error), FAILED)
    except OSError as error:
        _fail(f"{error.filename or settings.state_dir}: {error.strerror}", FAILED)


def _run(settings: HelperSettings, config: Path, agent_uid: int, users: frozenset[int]) -> int:
    ready = Readiness()
    state_dir = Path(settings.state_dir)
    if bad := configuration.unsafe(state_dir):
        raise HelperProblem(f"state_dir {state_dir}: {bad}")
    wanted = {CAP_NET_ADMIN} if settings.rails else set()
    wanted |= {CAP_KILL}
    server = HelperServer(Path(settings.socket), agent_uid)
    server.open()
    try:
        left = keep_only(frozenset(wanted))  # before any thread is there
        service = _service(settings, config, users)
        if missing := wanted - left:
            service.bulletin.emit("helper.lacks", settings.node, f"{words(missing)}: run it as root, or grant that")
        return _serve(settings, server, service, words(left), ready)
    finally:
        server.close()


def _serve(settings: HelperSettings, server: HelperServer, service: Service, rights: str, ready: Readiness) -> int:
    emit = service.bulletin.emit
    service.start()
    deadlines = Deadlines(service.injector, emit, settings.node)
    deadlines.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: server.stop())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    let_through()
    emit("helper.started", settings.node, f"pid {os.getpid()}, listens on {settings.socket}, capabilities {rights}")
    audit = HelperAudit(
        Path(settings.state_dir) / "audit.jsonl", settings.node, partial(emit, "audit.failed", settings.node)
    )
    ready.tell()
    server.serve(service.answer, partial(emit, "helper.refused", settings.node), service.keep_watchdog, audit)
    deadlines.close()
    left = service.close()
    emit("helper.ended", settings.node, "as asked")
    if left:
        text = "; ".join(f"{entry.id} on {entry.target} ({entry.detail})" for entry in left)
        print(f"ft-agent-helper: may still be in force: {text}", file=sys.stderr)
        return IN_FORCE
    return 0


def _service(settings: HelperSettings, config: Path, users: frozenset[int]) -> Service:
    state_dir = Path(settings.state_dir)

    def machine(announced: Announced) -> Machine:
        return Machine(
            scratch=scratch_directory(state_dir),
            rails=tuple(settings.rails),
            workers=announced,
            coordinator=announced.coordinator,
        )

    limits = Limits(
        node=settings.node,
        rails=tuple(settings.rails),
        management_nic=settings.management_nic,
        max_faults=settings.max_faults,
        max_duration_s=settings.max_duration_s,
        protection=tuple(filter(None, (settings.protect.of(str(config)),))),
    )
    ledger = Ledger(ledger_directory(state_dir))
    kennel = Kennel(state_dir, "helper")
    return Service(
        ledger,
        machine,
        limits,
        users=users,
        cgroups=tuple(settings.process_cgroups),
        registered_only=settings.registered_only,
        per_minute=settings.max_per_minute,
        kennel=kennel,
    )


def _summary(settings: HelperSettings) -> str:
    rails = ", ".join(settings.rails) or "no rails"
    users = ", ".join(str(user) for user in (settings.agent_user, *settings.process_users))
    kinds = (
        ("nodes", settings.protect.nodes),
        ("NICs", settings.protect.nics),
        ("replicas", settings.protect.replicas),
    )
    groups = ", ".join(settings.process_cgroups)
    which = "registered ranks" if settings.registered_only else "any processes"
    kept = ", ".join(f"{kind} {' '.join(patterns)}" for kind, patterns in kinds if patterns)
    return (
        f"heard: {settings.agent_user}; faults on {rails} and on {which} of {users}; at most {settings.max_faults} at"
        f" a time, {settings.max_duration_s:g} s each, {settings.max_per_minute} a minute"
        f"{f'; never on {kept}' if kept else ''}"
        f"{f'; processes in {groups} only' if groups else ''}"
    )


def _fail(text: str, code: int) -> None:
    print(f"ft-agent-helper: {text}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
