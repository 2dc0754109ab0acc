"""What all tests need."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background has Ctrl-C ignored, and what they start would inherit that: ftctl
# leaves signals alone that were ignored at its start, so the tests that send one would wait for nothing.
for _number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
