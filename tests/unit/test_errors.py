"""What a script that catches nothing shows of an error."""

from __future__ import annotations

import sys
import traceback

import pytest

from ftar_core.errors import FtarError, SettingsError


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tracebacks show notes from Python 3.11 on")
def test_a_traceback_ends_with_the_next_step() -> None:
    error = SettingsError("FTAR_REPLICA is not set", hint="set it")
    shown = "".join(traceback.format_exception_only(error)).splitlines()
    assert shown == ["ftar_core.errors.SettingsError: FTAR_REPLICA is not set", "next: set it"]
    assert not hasattr(FtarError("nothing to do"), "__notes__")
