"""ftar-coordinator: the process. Settings, sockets, store: in an order in which no failure changes anything."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType

from ftar_core.coordinator.book import Book
from ftar_core.coordinator.events import EventLog
from ftar_core.coordinator.listen import listen
from ftar_core.coordinator.options import Options, parse
from ftar_core.coordinator.service import RESTART, Service
from ftar_core.coordinator.store import FileStore
from ftar_core.errors import FencedError, FtarError, SettingsError
from ftar_core.protocol.coordinator import Coordinator
from ftar_core.runtime import breakpoints
from ftar_core.runtime.clock import SystemClock
from ftar_core.runtime.settings import read_breakpoints
from ftar_core.wire.breakpoints import coordinator_points

USAGE = 2
FAILED = 1


def main(arguments: list[str] | None = None) -> int:
    """Run until the job ends. Returns the exit code (see --help)."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        logging.getLogger().setLevel(logging.DEBUG if options.verbose else logging.INFO)
        return _serve(options)
    except FtarError as error:
        _say(f"{error}{f'; {error.hint}' if error.hint else ''}")
        if isinstance(error, FencedError):
            return RESTART
        return USAGE if isinstance(error, SettingsError) else FAILED
    except KeyboardInterrupt:
        return RESTART
    except Exception:
        # A mistake of ours. What matters is in the record, and the replicas wait: a restart is the best answer.
        logging.exception("internal error: the coordinator ends")
        return RESTART


def _serve(options: Options) -> int:
    specs = read_breakpoints(os.environ, coordinator_points())
    if specs is not None:
        armed = breakpoints.Breakpoints()
        armed.arm(specs)
        breakpoints.install(armed)
    sockets = listen(options.listen)
    store = FileStore(options.store, options.config.job)
    claim = store.claim(new=options.new, record_lost=options.record_lost)
    events = EventLog(options.store / "events.jsonl")
    clock = SystemClock()
    book = Book(store, options.config.replicas, clock, fresh=claim.fresh)
    service = Service(
        Coordinator(options.config, claim, clock.now(), book.accounting, book.kept),
        options.config.job,
        claim.term,
        options.tokens,
        store=store,
        events=events,
        sockets=sockets,
        clock=clock,
        book=book,
    )

    def stop(number: int, _frame: FrameType | None) -> None:
        service.stop(RESTART, f"stopped by {signal.Signals(number).name}; the replicas wait for the next coordinator")

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    for note in store.notes:
        _say(note)
    where = options.listen._replace(port=service.port)
    _say(f"job {options.config.job}, term {claim.term.number}, listening on {where}")
    if options.port_file is not None:
        _write_port(options, service.port)
    exit_code, reason = service.run()
    book.save()
    events.close()
    _say(reason)
    return exit_code


def _write_port(options: Options, port: int) -> None:
    path = options.port_file
    if path is None:
        return
    temporary = path.with_name(path.name + ".new")
    try:
        temporary.write_text(f"{port}\n", encoding="ascii")
        temporary.replace(path)
    except OSError as error:
        raise SettingsError(f"--port-file {path}: {error.strerror}", hint="choose another file") from None


def _say(text: str) -> None:
    print(f"ftar-coordinator: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
