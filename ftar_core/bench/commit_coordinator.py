"""The coordinator of `bench commit`: the real one, which ends with the benchmark."""

from __future__ import annotations

import sys

from ftar_core.bench.orphan import end_with_parent
from ftar_core.coordinator.__main__ import main

if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
