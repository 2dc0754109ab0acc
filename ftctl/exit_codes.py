"""The numbers ftctl exits with. Scripts and CI jobs decide on them, so they never change their meaning."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1  # it was tried and failed, or what was asked about is unhealthy
    USAGE = 2  # the command or the configuration is wrong; nothing was done
    NO_STEADY_STATE = 3  # the cluster was not in its steady state, nothing was injected
    STOPPED = 4  # a stop condition ended the experiment
    IN_FORCE = 5  # a fault may still be in force
    UNREACHABLE = 6  # some agent did not answer
    REFUSED = 7  # a guard said no
    PARTIAL = 8  # it was done on some nodes and not on others, and the request was for all of them
    INTERRUPTED = 130  # Ctrl-C, after everything begun was taken back


# The caller must hear of the most urgent one first: a fault in force needs hands now, what is half done must not be
# taken for the experiment that was meant, and a refusal matters more than a silent agent, which matters more than an
# ordinary failure. The rest follow in the order in which they block work.
_URGENCY = (
    ExitCode.IN_FORCE,
    ExitCode.INTERRUPTED,
    ExitCode.PARTIAL,
    ExitCode.REFUSED,
    ExitCode.UNREACHABLE,
    ExitCode.STOPPED,
    ExitCode.NO_STEADY_STATE,
    ExitCode.FAILED,
    ExitCode.USAGE,
    ExitCode.OK,
)


def most_urgent(codes: Iterable[ExitCode]) -> ExitCode:
    """The one code for several results at once: 5 > 8 > 7 > 6 > 1. No results at all are OK."""
    return min(codes, key=_URGENCY.index, default=ExitCode.OK)
