"""A module whose import kills the interpreter, once the fork server imports it."""

import os
import signal
import sys

if "--socket" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    print("imported here after all")
    return 0
