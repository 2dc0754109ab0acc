"""`python -m ftar_core.ncclcheck`: load the plugin with this environment, as NCCL would, and say what came of it.

One JSON document on stdout: {"devices": ["rail0", ...], "refused": "why, in the plugin's words"}. A process of its own,
because the plugin reads its environment once and is then there to stay.
"""

from __future__ import annotations

import json
import sys

from ftar_core.errors import NativeMissing
from ftar_core.ncclabi import Plugin, PluginError
from ftar_core.ncclenv import plugin_path

NEWEST = 12


def main() -> int:
    try:
        plugin = Plugin(plugin_path(), NEWEST)
    except (PluginError, NativeMissing, OSError, ValueError) as error:
        said = [line.partition("NET/FTAR : ")[2] for line in getattr(error, "said", ()) if line.startswith("2 ")]
        print(json.dumps({"devices": [], "refused": "; ".join(filter(None, said)) or str(error)}))
        return 0
    try:
        names = [plugin.properties(device).name.decode(errors="replace") for device in range(plugin.devices())]
    finally:
        plugin.close()
    print(json.dumps({"devices": names, "refused": ""}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
