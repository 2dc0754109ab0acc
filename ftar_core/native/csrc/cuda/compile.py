"""Makes kernels.ptx from kernels.cu, with nvcc. The PTX is kept in the repository: nobody needs nvcc to build.

    python ftar_core/native/csrc/cuda/compile.py [TARGET]

It should load wherever a driver is. So: the oldest virtual architecture that the compiler knows (compute_75), and of
the PTX language a version that a driver of 2019 reads (6.4, CUDA 10.1; the first with sm_75 is 6.3). Nothing here needs
a newer one, and ptxas, which refuses what a version does not have, is asked in the tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE, TARGET = HERE / "kernels.cu", HERE / "kernels.ptx"
ARCHITECTURE, LANGUAGE = "75", "6.4"


def compiled(nvcc: str) -> str:
    """The PTX of `kernels.cu`. Raises subprocess.CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.ptx"
        flags = ["--ptx", f"--gpu-architecture=compute_{ARCHITECTURE}", "--fmad=false", "--ftz=false"]
        subprocess.run([nvcc, *flags, "-o", str(out), str(SOURCE)], check=True)
        return normal(out.read_text())


def normal(ptx: str) -> str:
    """Of the compiler's comments only its release stays."""
    found = re.search(r"Cuda compilation tools, (release [\d.]+, V[\d.]+)", ptx)
    lines = [line.rstrip() for line in ptx.splitlines() if line.strip() and not line.lstrip().startswith("//")]
    text = "\n".join(lines) + "\n"
    text = re.sub(r"(?m)^\.version .*$", f".version {LANGUAGE}", text)
    return f"// Made by compile.py from kernels.cu; nvcc {found.group(1) if found else 'unknown'}\n{text}"


def release(ptx: str) -> str:
    return ptx.splitlines()[0]


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET).write_text(compiled("nvcc"))
