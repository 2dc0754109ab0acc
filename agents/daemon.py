"""`ft-agent`: its command line, its configuration, and the lock on its state directory.

Exit codes: 0 ended as asked; 1 something failed; 2 the configuration cannot be used; 5 a fault may still be in force.
What the process then is: nodeagent.py.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from agents import tokens
from agents.api.policyfile import PolicyProblem
from agents.assembly import FAILED, USAGE, DaemonProblem
from agents.health.xidtable import XidTableProblem
from agents.host.pidfile import Taken, only_one
from agents.host.readiness import Readiness
from agents.injection.ledger import LedgerError
from agents.nodeagent import NodeAgent
from agents.recovery.errors import SupervisionError
from agents.server import Listeners, ServerProblem
from agents.settings import SettingsProblem, load


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    os.umask(0o077)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="ft-agent: %(message)s")
    try:
        if options.simulate is not None:
            sys.exit(_simulate(parser, options))
        if options.config is None or options.inventory is not None:
            parser.error("--config FILE is needed, or --simulate N --inventory FILE")
        sys.exit(_run(options))
    except (SettingsProblem, PolicyProblem, XidTableProblem, tokens.TokensProblem, ServerProblem) as error:
        _fail(str(error), USAGE)
    except SupervisionError as error:
        _fail(f"{error}" + (f" ({error.hint})" if error.hint else ""), FAILED)
    except LedgerError as error:
        _fail(f"the ledger of faults cannot be used: {error}", FAILED)
    except DaemonProblem as error:
        _fail(str(error), error.code)
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ft-agent",
        description="The per-node agent: watches NICs, GPUs and replicas, injects faults and always takes them back.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the agent's configuration (YAML)")
    parser.add_argument("--allow-faults", action="store_true", help="allow fault injection on this node")
    parser.add_argument(
        "--stop-replicas", action="store_true", help="when the agent ends, end the replicas that it supervises too"
    )
    parser.add_argument(
        "--simulate", type=int, metavar="N", help="instead: serve N agents of nodes that exist only in memory"
    )
    parser.add_argument(
        "--inventory", type=Path, metavar="FILE", help="with --simulate: the file to write for ftctl --inventory"
    )
    return parser


def _simulate(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from agents.simulated.fleet import Fleet, FleetProblem

    if options.inventory is None or options.config is not None or options.allow_faults or options.stop_replicas:
        parser.error("--simulate N wants --inventory FILE, and no other option")
    try:
        Fleet(options.simulate, options.inventory).run()
    except FleetProblem as error:
        raise DaemonProblem(str(error), USAGE) from None
    return 0


def _fail(text: str, code: int) -> None:
    print(f"ft-agent: {text}", file=sys.stderr)
    sys.exit(code)


def _run(options: argparse.Namespace) -> int:
    settings = load(options.config)
    faults = bool(options.allow_faults) or settings.allow_faults
    settings = settings.model_copy(update={"allow_faults": faults})
    known = tokens.load(settings.tokens_file)
    ready = Readiness()
    with _state_lock(settings.state_dir), contextlib.closing(Listeners(settings)) as listeners:
        return NodeAgent(settings, faults, known, listeners, options.config).run(
            ready, stop_replicas=bool(options.stop_replicas)
        )


@contextlib.contextmanager
def _state_lock(state_dir: Path) -> Iterator[None]:
    """One agent a state directory: STATE/agent.pid, locked while the agent lives. Raises DaemonProblem."""
    with contextlib.ExitStack() as stack:
        try:
            if why := _foreign(state_dir):
                raise DaemonProblem(f"state_dir {state_dir}: {why}", USAGE)
            stack.enter_context(only_one(state_dir / "agent.pid"))
        except Taken as taken:
            raise DaemonProblem(f"state_dir {state_dir}: {taken.why('agent')}") from None
        except OSError as error:
            raise DaemonProblem(f"state_dir {error.filename or state_dir}: {error.strerror}", USAGE) from None
        yield


def _foreign(state_dir: Path) -> str:
    """Who else could put links there, for this agent to write somewhere else; empty: nobody. Raises OSError."""
    try:
        found = state_dir.stat()
    except FileNotFoundError:
        return ""
    if found.st_uid not in (0, os.geteuid()):
        return (
            f"belongs to user {found.st_uid}, who could have this agent write elsewhere; take another one, or chown it"
        )
    return f"other users can write there: chmod o-w {state_dir}" if found.st_mode & 0o002 else ""


if __name__ == "__main__":
    main()
