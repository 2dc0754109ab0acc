"""An agent reduced to its supervisor, to be killed: settings file and events file as arguments, commands on stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from agents.recovery.supervisor import Supervisor
from agents.settings import AgentSettings


def main() -> None:
    settings = AgentSettings.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    events = open(sys.argv[2], "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def emit(kind: str, thing: str, reason: str) -> None:
        events.write(json.dumps([kind, thing, reason]) + "\n")

    supervisor = Supervisor(settings, emit)
    supervisor.start()
    print("ready", flush=True)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "views":
            print(json.dumps([view.model_dump() for view in supervisor.views()]), flush=True)
        elif command == "close":
            supervisor.close(keep_processes=argument == "keep")
            print("closed", flush=True)
            return
        elif command == "restart_replica":
            supervisor.restart_replica(argument, "told to")
            print("done", flush=True)
        else:
            getattr(supervisor, command)(argument)
            print("done", flush=True)


if __name__ == "__main__":
    main()
