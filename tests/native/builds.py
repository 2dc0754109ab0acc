"""The native code built three times, and the native tests, the fuzz targets and storms run against each build:

    release   optimised, with assertions (those of the standard library's containers too)
    asan      AddressSanitizer with its leak check, and UndefinedBehaviorSanitizer
    tsan      ThreadSanitizer

    make test-native [KINDS=asan,tsan] [ROUNDS=3] [FAULTS=200] [SEED=7] [TESTS=tests/native/nccl]
    make fuzz [SECONDS=60]

The builds lie in build/native-KIND; the installed one is not touched (FTAR_TEST_BUILD, see __init__.py). Python itself
is not instrumented, so the sanitizer's runtime is preloaded into it. Reports go to files, since they may come from any
process that a test starts, and one report in any of them is a failure.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SUPPRESSIONS = Path(__file__).with_name("tsan.supp")
FUZZ = ("frames", "handle", "settings", "connection", "link", "inbox", "outbox")
KINDS = {
    "release": ["-DFTAR_CHECKED=ON", "-DCMAKE_CXX_FLAGS=-g"],
    "asan": ["-DFTAR_CHECKED=ON", "-DFTAR_SANITIZE=address,undefined"],
    "tsan": ["-DFTAR_CHECKED=ON", "-DFTAR_SANITIZE=thread"],
}
EVERYTHING, HARNESS = "tests/native", "tests/native/nccl"
OURS = ("_core.cpython", "libnccl-net-ftar", "fuzz_")


class Failed(Exception):
    pass


def say(text: str) -> None:
    print(f"==> {text}", file=sys.stderr, flush=True)


def folder(kind: str) -> Path:
    return ROOT / "build" / f"native-{kind}"


def run(argv: list[str], env: dict[str, str] | None = None) -> None:
    if (code := subprocess.run(argv, cwd=ROOT, env=env, check=False).returncode) != 0:
        raise Failed(f"exit code {code} of: {' '.join(argv)}")


def sources() -> dict[str, str]:
    """Everything that a build reads, with a hash of what is in it."""
    found = [ROOT / "CMakeLists.txt"]
    for top in ("ftar_core/native/csrc", "ftar_core/bench/csrc", "tests/native/fuzz"):
        found += [p for p in (ROOT / top).rglob("*") if p.suffix in {".cpp", ".h", ".txt", ".map", ".ptx"}]
    return {str(p.relative_to(ROOT)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(found)}


def stale(now: dict[str, str], built: dict[str, Any]) -> list[str]:
    """The sources that differ from those of the last build although they are not younger. The compiler's dependencies
    go by time, and a checkout that ran beside a build, or a copy that kept its times, makes old objects look new."""
    before, at = built.get("sources", {}), built.get("at", 0.0)
    changed = [name for name, digest in now.items() if before.get(name) not in {None, digest}]
    return [name for name in changed if (ROOT / name).stat().st_mtime <= at]


def build(kind: str, options: list[str], targets: tuple[str, ...] = ("_core", "nccl-net-ftar")) -> None:
    """Twice if the sources change meanwhile."""
    where = folder(kind)
    record = where / "sources.json"
    for _ in range(2):
        now = sources()
        old = stale(now, json.loads(record.read_text()) if record.exists() else {})
        if old:
            say(f"{where.relative_to(ROOT)}: built from another {old[0]}: all of it again")
        unknown = (where / "CMakeCache.txt").exists() and not record.exists()
        compile_in(where, options, targets, fresh=bool(old) or unknown)
        record.write_text(json.dumps({"at": time.time(), "sources": now}))
        if sources() == now:
            return
    raise Failed("the sources change while they are built")


def compile_in(where: Path, options: list[str], targets: tuple[str, ...], fresh: bool) -> None:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if cmake is None:
        raise Failed("cmake is missing; install it with: .venv/bin/python -m pip install cmake nanobind")
    say(f"building {where.relative_to(ROOT)}")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = [cmake, "-S", str(ROOT), "-B", str(where), *generator, "-DCMAKE_BUILD_TYPE=Check"]
    compile_all = [cmake, "--build", str(where), "--target", *targets, "--parallel", str(os.cpu_count() or 1)]
    if fresh:
        compile_all.append("--clean-first")
    for argv in ([*configure, f"-DPython_EXECUTABLE={sys.executable}", *options], compile_all):
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            print(done.stdout[-20_000:], file=sys.stderr)
            raise Failed(f"{where.relative_to(ROOT)} could not be built")


def library(name: str) -> str:
    """The compiler's own copy of a runtime library."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    path = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if "/" not in path:
        raise Failed(
            f"{name} is missing: it belongs to {compiler}; install the compiler's sanitizer libraries (libgcc-dev)"
        )
    return str(Path(path).resolve())


def environment(kind: str, reports: Path) -> dict[str, str]:
    env = {**os.environ, "FTAR_TEST_BUILD": str(folder(kind))}
    if kind == "release":
        return env
    log = f"log_path={reports}/report"
    # The C++ library too: the runtime looks for its functions when it starts, long before Python loads what needs them.
    env["LD_PRELOAD"] = f"{library(f'lib{kind}.so')} {library('libstdc++.so')}"
    # A process that breaks a rule aborts. A leak, found at the end of every process, is judged by its report alone: all
    # programs leak a little, and only what our code allocated counts.
    env["ASAN_OPTIONS"] = f"{log}:abort_on_error=1:detect_leaks=1:exitcode=0:quarantine_size_mb=64"
    env["LSAN_OPTIONS"] = "max_leaks=200:print_suppressions=0"
    env["UBSAN_OPTIONS"] = f"{log}:print_stacktrace=1"
    env["TSAN_OPTIONS"] = f"{log}:halt_on_error=1:exitcode=66:die_after_fork=0:suppressions={SUPPRESSIONS}"
    return env


def in_place(kind: str) -> list[str]:
    """ThreadSanitizer needs the old layout of addresses, whatever the kernel's randomness."""
    setarch = shutil.which("setarch")
    return [setarch, platform.machine(), "-R"] if kind == "tsan" and setarch else []


def findings(reports: Path) -> list[str]:
    """The reports in which our code has a part."""
    found = []
    for path in sorted(reports.glob("report*")):
        text = path.read_text(errors="replace")
        parts = re.split(r"(?m)^(?=(?:Direct|Indirect) leak of )", text)
        if "detected memory leaks" in parts[0]:
            parts = [part for part in parts[1:] if any(name in part for name in OURS)]
        found += [f"{path.name}: {part.strip()[:6000]}" for part in parts if part.strip()]
    return found


def judge(kind: str, reports: Path, failed: Failed | None) -> None:
    if found := findings(reports):
        print("\n\n".join(found), file=sys.stderr)
        raise Failed(f"{kind}: {len(found)} reports of the sanitizer, in {reports}")
    if failed is not None:
        raise failed


def check(kind: str, tests: str, faults: int, seed: int) -> None:
    reports = folder(kind) / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    env = environment(kind, reports)
    failed: Failed | None = None
    heavy = ["--heavy"] if kind != "release" else []
    storm = [sys.executable, "tests/native/nccl/storm.py", *heavy, "--seed", str(seed)]
    commands = [
        [sys.executable, "-m", "pytest", *tests.split(), "-p", "no:cacheprovider", "--timeout", "600", "--deselect",
         "tests/native/nccl/test_storm.py::test_a_storm_costs_no_byte_and_leaves_nothing"],
        [*storm, "--faults", str(faults)],
        [*storm, "--faults", str((faults + 1) // 2), "--rails", "3", "--no-large"],
        [*storm, "--faults", str((faults + 1) // 2), "--mode", "stripe", "--no-large"],
    ]  # fmt: skip
    for argv in commands if os.geteuid() == 0 else commands[:1]:
        say(f"{kind}: {' '.join(argv[1:])}")
        try:
            run([*in_place(kind), *argv], env)
        except Failed as error:
            failed = error
            break
    judge(kind, reports, failed)


def again(tests: str) -> str:
    """What a further round repeats: what depends on the moment, the plugin's harness, not the tests of pure code."""
    return HARNESS if tests == EVERYTHING else tests


def fuzz(seconds: float, seed: int) -> None:
    """With clang, libFuzzer does it; else our own driver."""
    clang = shutil.which("clang++")
    options = ["-DFTAR_FUZZ=ON", "-DFTAR_SANITIZE=address,undefined"]
    if clang:
        options += ["-DFTAR_LIBFUZZER=ON", f"-DCMAKE_CXX_COMPILER={clang}"]
    build("fuzz", options, ("fuzz",))
    failures = folder("fuzz") / "failures"
    failures.mkdir(exist_ok=True)
    each = seconds / len(FUZZ)
    for name in FUZZ:
        program = str(folder("fuzz") / "tests" / "native" / "fuzz" / f"fuzz_{name}")
        if clang:
            corpus = folder("fuzz") / f"corpus-{name}"
            corpus.mkdir(exist_ok=True)
            bounds = [f"-max_total_time={max(1, round(each))}", "-timeout=10", "-rss_limit_mb=1024"]
            words = [str(corpus), *bounds, f"-seed={seed % (1 << 32)}", f"-artifact_prefix={failures}/"]
            run([program, *words], {**os.environ, "FTAR_FUZZ_SEEDS": str(corpus)})
        else:
            run([program, "--seconds", str(each), "--seed", str(seed), "--save", str(failures)])


def main() -> int:
    parser = argparse.ArgumentParser(description="Test the native code in three builds.")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma list of " + ", ".join(KINDS))
    parser.add_argument(
        "--rounds", type=int, default=1, help="the first runs all tests, the others the plugin's harness"
    )
    parser.add_argument("--faults", type=int, default=40, help="of each storm")
    parser.add_argument("--seed", type=int, help="of storms and fuzzing; default: a new one")
    parser.add_argument("--tests", default=EVERYTHING, help="what pytest runs")
    parser.add_argument("--fuzz", type=float, metavar="SECONDS", help="fuzz so long, and nothing else")
    q = parser.parse_args()
    seed = q.seed if q.seed is not None else random.SystemRandom().randrange(1 << 31)
    kinds = q.kinds.split(",")
    if unknown := [k for k in kinds if k not in KINDS]:
        parser.error(f"no such kind of build: {', '.join(unknown)} (there are: {', '.join(KINDS)})")
    if q.faults < 1 or q.rounds < 1:
        parser.error("--faults and --rounds take a number from 1 on")
    begun = time.monotonic()
    try:
        if q.fuzz is not None:
            fuzz(q.fuzz, seed)
            return 0
        for kind in kinds:
            build(kind, KINDS[kind])
        for number in range(q.rounds):
            if "asan" in kinds:
                fuzz(3, seed + number)
            for kind in kinds:
                check(kind, again(q.tests) if number else q.tests, q.faults, seed + number)
                say(f"{kind}: in order (round {number + 1} of {q.rounds}, seed {seed + number})")
    except Failed as error:
        print(f"test-native: {error}; the seed was {seed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    say(f"all in order after {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
