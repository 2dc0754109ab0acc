"""Probes that `ftctl doctor` runs in child processes, so that neither a crash, a hang nor an import stays with it.

Each is a short program that prints one JSON object. Namespace probes try the real thing in a namespace that goes away
with the child: whether a kernel has netem is not written anywhere that can be trusted, and adding one takes a moment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

# In a new user namespace (unless root) and network namespace: what can a lab do there? Values are "" or the reason why
# not. unshare(2) through libc, because os.unshare is new in Python 3.12.
NAMESPACES = r"""
import ctypes, json, os, sys
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)
def unshare(flags):
    if libc.unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
answer, uid, gid = {}, os.geteuid(), os.getegid()
try:
    if uid != 0:
        unshare(CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    unshare(CLONE_NEWNET | CLONE_NEWNS)
    answer["namespaces"] = ""
except OSError as error:
    answer["namespaces"] = error.strerror
    print(json.dumps(answer)); sys.exit()
def attempt(name, action):
    try:
        action()
        answer[name] = ""
    except Exception as error:
        answer[name] = str(getattr(error, "args", None) and error.args[-1] or error)
try:
    from pyroute2 import IPRoute
    with IPRoute() as ip:
        attempt("veth", lambda: ip.link("add", ifname="v0", kind="veth", peer={"ifname": "v1"}))
        attempt("bridge", lambda: ip.link("add", ifname="b0", kind="bridge"))
        lo = ip.link_lookup(ifname="lo")[0]
        attempt("netem", lambda: ip.tc("add", "netem", lo, "1:", delay=1000))
        attempt("tc reset", lambda: answer["netem"] or ip.tc("del", "netem", lo, "1:"))
        attempt("tbf", lambda: ip.tc("add", "tbf", lo, "1:", rate="1mbit", burst=10000, latency="50ms"))
        answer.pop("tc reset")
except Exception as error:
    answer["veth"] = f"pyroute2: {error}"
import shutil, subprocess
nft = shutil.which("nft") or shutil.which("nft", path="/usr/sbin:/sbin")
if nft is None:
    answer["nftables"] = "the command nft is not installed"
else:
    rules = "table inet probe { chain c { type filter hook input priority 0; meta l4proto tcp counter drop; }; }"
    done = subprocess.run([nft, "-f", "-"], input=rules, capture_output=True, text=True, timeout=10)
    answer["nftables"] = done.stderr.strip().split("\n")[0] if done.returncode else ""
print(json.dumps(answer))
"""

NVML = r"""
import json
import pynvml
try:
    pynvml.nvmlInit()
    print(json.dumps({"gpus": pynvml.nvmlDeviceGetCount(), "driver": str(pynvml.nvmlSystemGetDriverVersion())}))
except pynvml.NVMLError as error:
    print(json.dumps({"error": str(error)}))
"""

NATIVE = r"""
import json
from ftar_core.native import _core
print(json.dumps({"file": _core.__file__}))
"""


@dataclass(frozen=True)
class Probed:
    """`answer` is what the probe printed; `trouble` why there is none, in one line."""

    answer: dict[str, str | int]
    trouble: str = ""


def run(code: str, timeout_s: float) -> Probed:
    """Run a probe in a Python of its own, killed with its children after `timeout_s`."""
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",  # nothing in the current directory may stand in for a package
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return Probed({}, f"no answer within {timeout_s:g} s")
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        raise
    try:
        answer = json.loads(out)
    except ValueError:
        last = err.strip().splitlines()[-1] if err.strip() else ""
        ended = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        return Probed({}, last or ended)
    return Probed(answer if isinstance(answer, dict) else {})
