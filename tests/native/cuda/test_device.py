"""The binding of the CUDA driver, over a driver without a GPU (fake_cuda.cpp): what it says when something is missing
or fails, the digests, and that the kernels kept in the repository are those of their source."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ftar_core.native import core

from ..cluster import NUMPY_TYPES, random_array
from .fake import KERNELS, ROOT, Fake, compiled, fake_gpu

COMPILE = runpy.run_path(str(KERNELS / "compile.py"))
PTX = KERNELS / "kernels.ptx"


@pytest.fixture
def fake() -> Iterator[Fake]:
    with fake_gpu() as gpu:
        yield gpu


def test_without_a_driver_the_reason_is_said() -> None:
    with pytest.raises(RuntimeError, match=r"the CUDA driver cannot be loaded: .*no-such-driver"):
        core.cuda_device(0, "libcuda-no-such-driver.so.1")


def test_a_driver_that_is_too_old_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    source = tmp_path / "old.cpp"
    source.write_text('extern "C" int cuInit(unsigned) { return 0; }\n')
    library = compiled(source, "libold.so")
    with pytest.raises(RuntimeError, match=r"libold.so has no cuDeviceGetCount: install one of CUDA 10\.1 or later"):
        core.cuda_device(0, str(library))


def test_a_gpu_that_is_not_there(fake: Fake) -> None:
    with pytest.raises(RuntimeError, match="there is no cuda:3: the CUDA driver shows 1"):
        core.cuda_device(3, fake.path)
    fake.set("devices", 0)
    with pytest.raises(RuntimeError, match=r"cuInit: CUDA_ERROR_NO_DEVICE"):
        core.cuda_device(0, fake.path)


@pytest.mark.parametrize("call", ["cuStreamCreate", "cuModuleLoadData", "cuModuleGetFunction", "cuMemHostAlloc"])
def test_a_device_that_cannot_be_set_up_leaves_nothing_behind(fake: Fake, call: str) -> None:
    before = fake.pinned_blocks()
    fake.fail(call, 1, 2)
    with pytest.raises(RuntimeError, match=f"{call}: CUDA_ERROR_OUT_OF_MEMORY"):
        fake.device()
    assert fake.pinned_blocks() == before
    device = fake.device()
    assert device.name == "cuda:0 (Fake GPU)"
    del device
    assert fake.pinned_blocks() == before


@pytest.mark.parametrize("dtype", list(NUMPY_TYPES))
def test_digests_on_the_device_are_those_of_a_copy(fake: Fake, dtype: str) -> None:
    rng = np.random.default_rng(3)
    device = fake.device()
    areas, wanted = [], []
    for seed, size in enumerate([0, 1, 3, 63, 64, 65, 127, 128, 129, 1024, 1025, 20_011]):
        values = random_array(rng, size, dtype)
        for poison in (None, 0, size // 2, size - 1):
            copy = values.copy()
            if poison is not None and size and np.issubdtype(copy.dtype, np.floating):
                copy[poison] = np.inf if seed % 2 else np.nan
            elif poison is not None and size and dtype == "bfloat16":
                copy[poison] = 0x7F80 if seed % 2 else 0xFFC1
            areas.append((fake.put(copy), size, core.DTYPES[dtype], seed))
            wanted.append(core.check(copy.ctypes.data, size, core.DTYPES[dtype], seed))
    assert device.check(areas) == wanted
    if dtype not in {"int32", "int64"}:
        assert {finite for _, finite in wanted} == {True, False}


def test_more_areas_than_one_launch_takes(fake: Fake) -> None:
    values = np.arange(100, dtype=np.float32)
    device, address = fake.device(), fake.put(values)
    found = device.check([(address, 100, 0, seed) for seed in range(600)])
    assert found == [core.check(values.ctypes.data, 100, 0, seed) for seed in range(600)]


def test_an_error_of_the_device_is_told_by_name_and_for_good(fake: Fake) -> None:
    device, address = fake.device(), fake.put(np.zeros(8, np.float32))
    fake.set("fail_task", 0)
    with pytest.raises(
        RuntimeError, match=r"cuda:0 \(Fake GPU\): .*CUDA_ERROR_ILLEGAL_ADDRESS \(an illegal memory access"
    ):
        device.check([(address, 8, 0, 0)])
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in device.failure()
    fake.set("error", 0)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        device.check([(address, 8, 0, 0)])


HUNG = """
import sys
from tests.native.cuda import fake as module
from ftar_core.native import core
module.library = lambda: sys.argv[1]
gpu = module.Fake()
device, address = gpu.device(timeout_ms=300), gpu.put(__import__("numpy").zeros(8, "float32"))
gpu.hang(sys.argv[2]) if sys.argv[2].startswith("cu") else gpu.set(sys.argv[2], 0)
device.check([(address, 8, 0, 0)])
"""


@pytest.mark.parametrize(
    ("how", "what"),
    [("hang_task", "has not finished a copy or a kernel"), ("cuLaunchKernel", "has not answered a call of the driver")],
)
def test_a_device_that_does_not_come_back_ends_the_process_with_a_reason(fake: Fake, how: str, what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HUNG, fake.path, how],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 75, done.stderr
    assert f"ftar: cuda:0 (Fake GPU) {what} for 0.3" in done.stderr
    assert "it hangs, so this process ends" in done.stderr


def test_the_host_cannot_touch_the_memory_of_the_fake() -> None:
    """What the other tests rely on."""
    program = (
        HUNG.split("device,", maxsplit=1)[0]
        + "device = gpu.device(); core.sum_into(gpu.alloc(64), gpu.alloc(64), 1, 0)"
    )
    with fake_gpu() as gpu:
        argv = [sys.executable, "-c", program, gpu.path]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        for sanitizer in ("ASAN_OPTIONS", "TSAN_OPTIONS"):  # what is meant here is no finding
            env[sanitizer] = f"{os.environ.get(sanitizer, '')}:handle_segv=0"
        done = subprocess.run(argv, cwd=ROOT, env=env, check=False, timeout=300)
    assert done.returncode not in {0, 1}


needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: kernels.ptx cannot be made again")
needs_ptxas = pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas: kernels.ptx cannot be looked at")


@needs_nvcc
def test_the_kernels_are_those_of_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)  # a sanitizer's runtime, in which nvcc crashes
    fresh, kept = COMPILE["compiled"]("nvcc"), PTX.read_text()
    if COMPILE["release"](fresh) != COMPILE["release"](kept):
        pytest.skip(f"another nvcc ({COMPILE['release'](fresh)}) writes other text")
    assert fresh == kept, "run: python ftar_core/native/csrc/cuda/compile.py"


@needs_ptxas
@pytest.mark.parametrize("architecture", [75, 80, 90, 100])
def test_the_kernels_are_code_for_gpus_from_2018_on(
    architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    argv = ["ptxas", f"--gpu-name=sm_{architecture}", "-o", str(tmp_path / "out"), str(PTX)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kernels_round_as_the_cpu_does() -> None:
    """In their text: no fused multiply-add, no flush to zero, and a language that drivers of CUDA 10.1 read."""
    text = PTX.read_text()
    assert not re.search(r"\bfma\.|\.ftz|\bmad\.(rn|f32)", text)
    assert re.search(r"add\.(rn\.)?f32", text)
    assert re.search(r"add\.(rn\.)?f64", text)
    assert ".version 6.4\n.target sm_75\n" in text
