"""Tests of the native core and of the NCCL plugin.

FTAR_TEST_BUILD, for tests only: a build folder (the module and the plugin somewhere below it) that stands in for the
installed native code, in this process and in those it starts. `make test-native` sets it to builds with sanitizers.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from ftar_core import ncclenv

# Such a build is several times slower, so whoever waits waits longer, and who is late counts as dead later.
PATIENCE = 6 if os.environ.get("FTAR_TEST_BUILD") else 1
HEARTBEAT_MS = 50 * min(PATIENCE, 3)


def _the_only(pattern: str, folder: Path) -> Path:
    found = sorted(folder.rglob(pattern))
    assert len(found) == 1, f"FTAR_TEST_BUILD={folder}: {pattern} is there {len(found)} times"
    return found[0]


def _use_build(folder: Path) -> None:
    """Before anybody imports them: packages look into sys.modules first, and names are bound at import."""
    name = "ftar_core.native._core"
    assert name not in sys.modules, "the installed module was loaded first"
    spec = importlib.util.spec_from_file_location(name, _the_only("_core*.so", folder))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    plugin = _the_only(ncclenv.LIBRARY, folder)
    ncclenv.plugin_path = lambda: plugin


if os.environ.get("FTAR_TEST_BUILD"):
    _use_build(Path(os.environ["FTAR_TEST_BUILD"]))
