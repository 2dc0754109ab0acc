"""A Linux with systemd as its first process, for units: namespaces of this kernel, this machine's own files underneath.

What is written goes to memory (an overlay), what else of this machine's services there is does not start. The network
is its own: eth0, eth1 and eth2, each with a far end. It ends with its first process, and its control group with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
SYSTEMD = Path("/usr/lib/systemd/systemd")
PROGRAMS = ("unshare", "nsenter", "systemctl", "journalctl", "systemd-analyze", "systemd-sysusers", "ip")
NICS = ("eth0", "eth1", "eth2")

# $1: an empty directory; the rest: directories of this machine that must be there, since they may be file systems of
# their own. /proc/sys and /sys are read-only, as container managers have them, so that nothing is set for this kernel.
BOOT = r"""
set -eu
base=$1; shift
mount --make-rprivate /
mount -t tmpfs tmpfs "$base"
root=$base/root
mkdir "$base/upper" "$base/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$root"
rm -rf "$root"/etc/systemd/system/* "$root"/etc/systemd/system.control "$root"/usr/lib/systemd/system/*.wants \
  "$root"/etc/ftctl "$root"/var/lib/ft-agent "$root"/var/lib/ftctl-helper "$root"/var/log/journal
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"; mount -o remount,bind,ro "$root/proc/sys"
mount --bind /proc/sys/net "$root/proc/sys/net" 2>/dev/null || true
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
for one in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$one"; done
chmod 1777 "$root/tmp"
for one in null zero full random urandom tty; do touch "$root/dev/$one"; mount --bind "/dev/$one" "$root/dev/$one"; done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"; ln -s /proc/self/fd "$root/dev/fd"; ln -s null "$root/dev/console"
for one in "$@"; do
  mkdir -p "$root$one"
  mount --bind "$one" "$root$one"; mount -o remount,bind,ro "$root$one"
  above=$one; while above=$(dirname "$above"); [ "$above" != / ]; do chmod a+x "$root$above"; done
done
echo 0123456789abcdef0123456789abcdef > "$root/etc/machine-id"
mkdir -p "$root/etc/systemd/journald.conf.d"
printf '[Journal]\nStorage=volatile\nReadKMsg=no\nRateLimitBurst=0\n' > "$root/etc/systemd/journald.conf.d/test.conf"
printf '[Unit]\nRequires=basic.target systemd-journald.service\nAfter=basic.target systemd-journald.service\n' \
  > "$root/etc/systemd/system/test.target"
ip link set lo up
for nic in eth0 eth1 eth2; do
  ip link add "$nic" type veth peer name "far-$nic"; ip link set "$nic" up; ip link set "far-$nic" up
done
cd "$root"; mkdir .old; pivot_root . .old; umount -l /.old
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /usr/lib/systemd/systemd --unit=test.target
"""


def lacking() -> str:
    """Why there can be no such machine here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root (namespaces, mounts)"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or not SYSTEMD.exists():
        return f"not installed: {', '.join(missing) or SYSTEMD} (apt-get install systemd iproute2 util-linux)"
    if _cgroup2() is None:
        return "no control groups of version 2 are mounted here"
    for path in (CHECKOUT, Path(sys.prefix), Path(sys.base_prefix)):
        if path.stat().st_mode & 0o005 != 0o005:
            return f"{path} is not readable by other users"
        if path.resolve().is_relative_to("/tmp") or path.resolve().is_relative_to("/var/tmp"):
            return f"{path} is in a directory for temporary files: the units have their own (PrivateTmp)"
    return ""


class Booted:
    def __init__(self, init: int) -> None:
        self.init = init

    def run(self, *command: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """By root, inside."""
        enter = ("nsenter", "--target", str(self.init), "--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup")
        return subprocess.run(
            [*enter, "--", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd="/",
        )

    def do(self, *command: str) -> str:
        """What it said. It must succeed."""
        done = self.run(*command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}{self.journal()[-2000:]}"
        return done.stdout

    def shell(self, script: str) -> str:
        return self.do("sh", "-ec", script)

    def journal(self, unit: str = "", *more: str) -> str:
        return self.run("journalctl", "--no-pager", "-q", "-o", "cat", *(("-u", unit) if unit else ()), *more).stdout

    def shown(self, unit: str, name: str) -> str:
        return self.do("systemctl", "show", unit, "--property", name, "--value").strip()

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        self.do("install", "-D", "-m", f"{mode:o}", "/dev/null", path)
        root = Path(f"/proc/{self.init}/root{path}")
        root.write_text(text)


@contextmanager
def booted() -> Iterator[Booted]:
    base = Path(tempfile.mkdtemp(prefix="ft-booted-"))
    group = _own_cgroup() / base.name
    group.mkdir()
    wanted = {Path(path).resolve() for path in (CHECKOUT, sys.prefix, sys.base_prefix)}
    shared = sorted(str(path) for path in wanted if not wanted & set(path.parents))
    kinds = ("--pid", "--mount", "--net", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child")
    # Into its control group first, which is then the root of its control group namespace.
    words = ["sh", "-c", f'echo 0 > {group}/cgroup.procs; exec unshare {" ".join(kinds)} sh -c "$@"', "sh"]
    log = (base.parent / f"{base.name}.log").open("w+b")
    process = subprocess.Popen(
        [*words, BOOT, "boot", str(base), *shared], stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    try:
        yield Booted(_first_process(process, log.name))
    finally:
        process.kill()  # and with it, as asked, the first process of the namespace, and so all others
        process.wait(30)
        log.close()
        Path(log.name).unlink()
        _remove_group(group)
        with suppress(OSError):
            base.rmdir()


def _first_process(process: subprocess.Popen[bytes], log: str) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        found = children.read_text().split()
        if found and Path(f"/proc/{found[0]}/comm").read_text().strip() == "systemd":
            machine = Booted(int(found[0]))
            if machine.run("systemctl", "is-system-running").stdout.strip() in ("running", "degraded"):
                return machine.init
        time.sleep(0.1)
    raise AssertionError(f"systemd did not start: {Path(log).read_text(errors='replace')}")


def _cgroup2() -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _device, where, kind, *_rest = line.split()
        if kind == "cgroup2":
            return Path(where)
    return None


def _own_cgroup() -> Path:
    mounted = _cgroup2()
    assert mounted is not None
    (own,) = (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    return mounted / own.lstrip("/")


def _remove_group(group: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (group / "cgroup.events").read_text().startswith("populated 1"):
        for procs in group.rglob("cgroup.procs"):
            for pid in procs.read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    for directory, _names, _files in os.walk(group, topdown=False):
        Path(directory).rmdir()
