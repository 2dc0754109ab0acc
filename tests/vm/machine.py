"""A small virtual machine with a distribution's kernel, for what this kernel lacks.

It boots into an initramfs of busybox, this Python, the checkout and its tests, runs them there and ends.

Emulated (TCG), so that it needs no rights and no hardware; a boot takes some ten seconds, and Python is slow in it.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PROGRAMS = ("nft", "tc", "ip", "sleep")
PACKAGES = (
    *("msgspec", "pyroute2", "psutil"),
    *("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"),
    *("hypothesis", "_hypothesis_globals", "sortedcontainers", "typing_extensions"),  # tests/conftest.py
)
MODULES = ("veth", "sch_netem", "sch_tbf", "nf_tables", "nft_numgen")
SOURCES = ("agents", "ftar_core", "tests/agents", "tests/conftest.py")
END = "the-tests-ended-with"
INIT = f"""#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp /sbin /run
/bin/busybox --install -s /bin
mount -t proc none /proc; mount -t sysfs none /sys; mount -t devtmpfs none /dev; mkdir -p /dev/shm
mount -t tmpfs none /tmp; mount -t tmpfs none /dev/shm
ln -s /bin/busybox /sbin/modprobe
export PATH=/real:/bin:/sbin HOME=/tmp PYTHONPATH=/work:/packages PYTHONDONTWRITEBYTECODE=1
for module in {" ".join(MODULES)}; do modprobe $module || echo "no module $module"; done
ip link set lo up
cd /work
"$(cat /python)" -m pytest -p no:cacheprovider -c /dev/null -o markers=root --rootdir /work -rA $(cat /tests) 2>&1
echo "{END} $?"
poweroff -f
"""


def lacking(kernel: Path) -> str:
    """Why there can be no such machine here; empty if there can."""
    missing = [name for name in ("qemu-system-x86_64", "busybox", *PROGRAMS) if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install qemu-system-x86 busybox-static nftables iproute2)"
    if not list(kernel.glob("boot/vmlinuz-*")):
        return f"no kernel under {kernel} (make vm fetches one)"
    return ""


def build(kernel: Path, root: Path, tests: Iterable[str]) -> Path:
    """The initramfs, under `root`."""
    tree = root / "tree"
    for name in ("bin", "real", "packages", "work"):
        (tree / name).mkdir(parents=True)
    _copy_program(Path(shutil.which("busybox") or ""), tree / "bin/busybox", tree)
    for name in PROGRAMS:
        _copy_program(Path(shutil.which(name) or ""), tree / "real" / name, tree)
    python = Path(os.path.realpath(sys.executable))
    _copy_program(python, tree / str(python)[1:], tree)
    (tree / "python").write_text(str(python))
    library = Path(sysconfig.get_path("stdlib"))
    leave = shutil.ignore_patterns("test", "tests", "idlelib", "tkinter", "ensurepip", "site-packages", "dist-packages")
    shutil.copytree(library, tree / str(library)[1:], ignore=leave, symlinks=True)
    for package in PACKAGES:
        found = Path(__import__(package).__file__ or "")
        if found.name == "__init__.py":
            shutil.copytree(found.parent, tree / "packages" / package, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(found, tree / "packages")
    for metadata in Path(sysconfig.get_path("purelib")), Path(pytest.__file__).parents[1]:
        for found in metadata.glob("pluggy-*.dist-info"):  # pytest tells its version
            shutil.copytree(found, tree / "packages" / found.name, dirs_exist_ok=True)
    for compiled in [*(tree / "packages").rglob("*.so"), *(tree / str(library)[1:]).rglob("*.so")]:
        _copy_libraries(compiled, tree)
    for source in SOURCES:
        found, to = CHECKOUT / source, tree / "work" / source
        if found.is_dir():
            shutil.copytree(found, to, ignore=shutil.ignore_patterns("__pycache__", "*.so", "csrc", "bench"))
        else:
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, to)
    _copy_modules(kernel, tree)
    (tree / "tests").write_text(" ".join(tests))
    (tree / "init").write_text(INIT)
    (tree / "init").chmod(0o755)
    names = "\n".join(str(p.relative_to(tree)) for p in sorted(tree.rglob("*")))
    packed = subprocess.run(
        ["busybox", "cpio", "-o", "-H", "newc"], cwd=tree, input=names.encode(), capture_output=True, check=True
    )
    image = root / "initramfs.gz"
    image.write_bytes(gzip.compress(packed.stdout, 1))
    return image


def run(kernel: Path, image: Path, timeout_s: float) -> str:
    """What it said until it ended. Raises subprocess.TimeoutExpired."""
    arguments = ["-m", "1024", "-smp", "1", "-accel", "tcg", "-cpu", "max", "-nographic", "-no-reboot", "-nic", "none"]
    words = "console=ttyS0 quiet panic=-1 edd=off random.trust_cpu=on"
    vmlinuz = next(iter(kernel.glob("boot/vmlinuz-*")))
    done = subprocess.run(
        ["qemu-system-x86_64", *arguments, "-kernel", str(vmlinuz), "-initrd", str(image), "-append", words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )
    return done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")


def _copy_program(program: Path, to: Path, tree: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(os.path.realpath(program), to)
    _copy_libraries(to, tree)


def _copy_libraries(binary: Path, tree: Path) -> None:
    shown = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False).stdout
    for word in shown.split():
        if word.startswith("/") and not (tree / word[1:]).exists():
            (tree / word[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(word), tree / word[1:])


def _copy_modules(kernel: Path, tree: Path) -> None:
    version = next(iter(kernel.glob("boot/vmlinuz-*"))).name.removeprefix("vmlinuz-")
    modules = Path("lib/modules") / version
    for part in ("kernel/net", "kernel/lib", "kernel/crypto", "kernel/arch/x86/crypto", "kernel/drivers/net/veth.ko"):
        found, to = kernel / modules / part, tree / modules / part
        if found.is_dir():
            shutil.copytree(found, to)
        elif found.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, to)
    for listed in (kernel / modules).glob("modules.*"):
        shutil.copy(listed, tree / modules / listed.name)
    subprocess.run(["busybox", "depmod", "-b", str(tree), version], check=True, capture_output=True)
