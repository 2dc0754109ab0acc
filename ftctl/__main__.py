"""Where the `ftctl` command begins: as little as possible before Ctrl-C is answered with an exit code."""

from __future__ import annotations

import gc
import os
import sys

# Garbage is looked for after so many new objects. Python's 700 are for small programs: where a thousand agents answer,
# a fifth of the CPU goes into looking at answers again and again that are all still wanted.
COLLECT_AFTER = 50_000


def _streams() -> None:
    """Whoever started us may have closed some of the three (`2>&-`). The next file that is opened would get such a
    number, and what is said to people would be written into it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, so this one
            setattr(sys, name, os.fdopen(handle, mode))


def main() -> int:
    """Run sys.argv. Importing the command line takes some 50 ms, in which Ctrl-C must not end in a traceback either."""
    _streams()
    gc.set_threshold(COLLECT_AFTER)
    try:
        from ftctl.app import main as run
        from ftctl.context import World

        return run(world=World(whole_process=True))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
