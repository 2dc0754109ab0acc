"""The checks of `ftctl doctor`: each gives a verdict, the sentence why, and the command that puts it right.

`ok` works. `warn` does not work, and something optional is not possible for that reason (a lab, GPUs, training here).
`missing` is needed by every use of ftctl on this machine and broken.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ftctl.commands import probes

OUR_PACKAGES = ("ftctl", "agents", "ftar_core")
_NVML_TIMEOUT_S = 15.0  # the first NVML call of a boot loads the driver
_NAMESPACE_TIMEOUT_S = 20.0
_NATIVE_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Check:
    """One line of the report. `status`: ok, warn or missing. `fix` is a command or a step, empty when there is none."""

    name: str
    status: str
    text: str
    fix: str = ""


def run_all() -> Iterator[Check]:
    """All checks, the quick ones first. Never raises: a check that breaks says so in its line."""
    every: tuple[Callable[[], Iterator[Check]], ...] = (
        _python,
        _packages_in_the_way,
        _dependencies,
        _extras,
        _native_core,
        _compiler,
        _torch,
        _nccl,
        _namespaces,
        _nvml,
    )
    for check in every:
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 - a broken check must not hide the others
            yield Check(check.__name__.strip("_"), "warn", f"the check itself failed: {type(error).__name__}: {error}")


def _python() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} ({sys.executable})")
    if sys.platform == "linux":
        yield Check("system", "ok", f"Linux {platform.release()} on {platform.machine()}")
    else:
        yield Check(
            "system", "warn", f"{platform.system()}: ftctl works as a client; agents, labs and training need Linux"
        )


def _packages_in_the_way() -> Iterator[Check]:
    """Other projects also install a package named `agents`; whichever comes first on the path is imported."""
    home = Path(__file__).resolve().parent.parent.parent
    providers = metadata.packages_distributions()
    for name in OUR_PACKAGES:
        spec = importlib.util.find_spec(name)
        places = [Path(place).resolve() for place in (spec.submodule_search_locations or [])] if spec else []
        others = sorted(set(providers.get(name, [])) - {"ftctl"})
        if not places:
            yield Check(f"package {name}", "missing", "cannot be found", "pip install --force-reinstall ftctl")
        elif home / name not in places:
            yield Check(
                f"package {name}",
                "missing",
                f"another package named {name} is in the way: {places[0]}",
                f"pip uninstall {others[0]}" if others else f"move {places[0]} away, or start Python elsewhere",
            )
        elif others:
            yield Check(
                f"package {name}",
                "missing",
                f"{', '.join(others)} installs a package of the same name into the same place: files may be mixed",
                f"pip uninstall {' '.join(others)} && pip install --force-reinstall ftctl",
            )
        else:
            yield Check(f"package {name}", "ok", str(home / name))


def _requirements(extra: str | None) -> list[str]:
    """The requirement lines of the installed distribution, without or with an extra, without their markers."""
    try:
        lines = metadata.requires("ftctl") or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        wanted = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", marker)
        if (wanted.group(1) if wanted else None) != extra:
            continue
        if "sys_platform" in marker and "linux" in marker and sys.platform != "linux":
            continue
        found.append(requirement.strip())
    return found


def _unmet(requirement: str) -> tuple[str, str]:
    """(what is installed, what is wrong with it) for a line like `httpx>=0.27`; the second is empty when it will do."""
    match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*(?:>=\s*([0-9.]+))?", requirement)
    if match is None:
        return requirement, ""
    name, least = match[1], match[2]
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return name, f"{name} is not installed"
    if least and _numbers(version) < _numbers(least):
        return f"{name} {version}", f"{name} is {version}, {least} or later is needed"
    return f"{name} {version}", ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _dependencies() -> Iterator[Check]:
    lines = _requirements(None)
    if not lines:
        yield Check("dependencies", "warn", "ftctl runs from source and is not installed", "pip install -e .")
        return
    results = [_unmet(line) for line in lines]
    wrong = [trouble for _, trouble in results if trouble]
    if wrong:
        yield Check("dependencies", "missing", "; ".join(wrong), "pip install --upgrade ftctl")
    else:
        yield Check("dependencies", "ok", ", ".join(have for have, _ in results))


def _extras() -> Iterator[Check]:
    wrong = [trouble for _, trouble in map(_unmet, _requirements("agent")) if trouble]
    if wrong:
        yield Check("agent", "warn", f"no agent can run here: {'; '.join(wrong)}", "pip install 'ftctl[agent]'")
    else:
        yield Check("agent", "ok", "all that an agent needs is installed")


def _native_core() -> Iterator[Check]:
    if sys.platform != "linux":
        yield Check("native core", "warn", "Linux only: no training here")
        return
    probed = probes.run(probes.NATIVE, _NATIVE_TIMEOUT_S)
    if probed.trouble:
        yield Check(
            "native core",
            "missing",
            f"cannot be loaded: {probed.trouble}",
            "pip install --force-reinstall --no-binary ftctl ftctl   (needs a C++20 compiler)",
        )
    else:
        yield Check("native core", "ok", str(probed.answer.get("file", "")))


def _compiler() -> Iterator[Check]:
    """Needed only to build the native core from source; tried, since a name says nothing about C++20."""
    tried = []
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        path = shutil.which(name)
        if path is None:
            continue
        done = subprocess.run(
            [path, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"],
            input="#include <span>\nint main() {}\n",
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if done.returncode == 0:
            yield Check("compiler", "ok", f"{path} compiles C++20")
            return
        tried.append(path)
    why = f"{tried[0]} does not compile C++20" if tried else "no C++ compiler found"
    yield Check("compiler", "warn", f"{why} (needed only to build from source)", "apt-get install g++")


def _torch() -> Iterator[Check]:
    if importlib.util.find_spec("torch") is None:
        yield Check(
            "torch",
            "warn",
            "not installed (needed where replicas train, not for ftctl or agents)",
            "pip install 'ftctl[train]'",
        )
        return
    have, wrong = _unmet("torch>=2.6")
    yield Check("torch", "warn" if wrong else "ok", wrong or have, "pip install --upgrade torch" if wrong else "")


def _nccl() -> Iterator[Check]:
    """Which interface of our plugin the installed NCCL would load; nothing is loaded to find out."""
    from ftar_core import ncclenv
    from ftar_core.errors import NativeMissing

    if sys.platform != "linux":
        return
    try:
        plugin = str(ncclenv.plugin_path())
    except NativeMissing as error:
        yield Check("NCCL plugin", "warn", str(error), error.hint)
        return
    found = ncclenv.find_nccl()
    if found is None:
        yield Check("NCCL plugin", "ok", f"{plugin}; no NCCL here to load it (needed where GPUs train)")
    elif found.abi is None:
        why = f"NCCL {found.version_text} ({found.path}) is too old for it: 2.20 or later is needed"
        yield Check("NCCL plugin", "warn", why, "pip install --upgrade nvidia-nccl-cu12")
    else:
        text = f"NCCL {found.version_text} ({found.path}) loads ncclNetPlugin_v{found.abi} of {plugin}"
        newer = "; this NCCL is newer than those that were tried" if found.newer_than_known else ""
        yield Check("NCCL plugin", "warn" if newer else "ok", text + newer)
    made = ncclenv.trial({}, os.environ)
    if made.refused:
        yield Check("NCCL rails", "warn", f"none: {made.refused}")
    elif len(made.devices) == 1:
        text = f"{made.devices[0]} only: an NCCL job ends when it fails"
        yield Check("NCCL rails", "warn", text, "ftctl env nccl --rails NIC,NIC")
    else:
        yield Check("NCCL rails", "ok", f"{', '.join(made.devices)}: what the plugin would use here")
    if ports := ncclenv.active_rdma_ports():
        yield Check(
            "RDMA",
            "warn",
            f"{ncclenv.ports_in_words(ports)}; the plugin carries sockets only",
            "ftctl env nccl --allow-sockets   (if that is wanted)",
        )


def _namespaces() -> Iterator[Check]:
    if sys.platform != "linux":
        yield Check("lab", "warn", "labs need Linux")
        return
    who = "root" if os.geteuid() == 0 else "user namespaces, without root"
    probed = probes.run(probes.NAMESPACES, _NAMESPACE_TIMEOUT_S)
    trouble = probed.trouble or str(probed.answer.get("namespaces", ""))
    if trouble:
        fix = "run as root" if os.geteuid() == 0 else "sysctl kernel.unprivileged_userns_clone=1   (or run as root)"
        yield Check("namespaces", "warn", f"cannot be made ({trouble}): no lab on this machine", fix)
        return
    yield Check("namespaces", "ok", who)
    purpose = {
        "veth": ("rails of a lab", "modprobe veth"),
        "bridge": ("the rails' switches in a lab", "modprobe bridge"),
        "nftables": ("faults that drop packets", "apt-get install nftables"),
        "netem": ("faults that delay or lose packets", "modprobe sch_netem"),
        "tbf": ("limits on a rail's rate", "modprobe sch_tbf"),
    }
    for name, (use, fix) in purpose.items():
        reason = str(probed.answer.get(name, "not tried"))
        if reason:
            yield Check(name, "warn", f"{reason} (needed for {use})", fix)
        else:
            yield Check(name, "ok", use)


def _nvml() -> Iterator[Check]:
    probed = probes.run(probes.NVML, _NVML_TIMEOUT_S)
    if probed.trouble:
        yield Check("NVML", "warn", probed.trouble, "nvidia-smi   (does it answer?)")
    elif "error" in probed.answer:
        yield Check("NVML", "warn", f"no GPUs ({probed.answer['error']})")
    else:
        yield Check("NVML", "ok", f"{probed.answer['gpus']} GPUs, driver {probed.answer['driver']}")
