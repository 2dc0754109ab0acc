"""Where the `ftctl` command begins: as little as possible before Ctrl-C is answered with an exit code."""

from __future__ import annotations

import sys


def main() -> int:
    """Run sys.argv. Importing the command line takes some 50 ms, in which Ctrl-C must not end in a traceback either."""
    try:
        from ftctl.app import main as run
        from ftctl.context import World

        return run(world=World(whole_process=True))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
