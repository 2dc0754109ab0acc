"""The binding of libnccl against a library that behaves as NCCL does: what it loads, and how a communicator lives."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ftar_core import nccllib
from ftar_core.errors import SettingsError
from ftar_core.nccllib import Communicator, Library, NcclError, NcclType

from .fake import HostDevice, build


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def members(library: Library, count: int) -> list[Communicator]:
    """All of one communicator, in this process."""
    unique_id = library.unique_id()
    made = [library.join(unique_id, count, me) for me in range(count)]
    until(lambda: all(comm.ready() for comm in made))
    return made


def test_three_members_add_up_and_each_has_the_sum_when_its_stream_says_so() -> None:
    library = Library(build())
    comms, devices = members(library, 3), [HostDevice(library.path) for _ in range(3)]
    for dtype, kind in ((torch.float32, NcclType.FLOAT32), (torch.bfloat16, NcclType.BFLOAT16)):
        given = [torch.randn(1001).to(dtype) for _ in comms]
        sums = [torch.full_like(tensor, 77) for tensor in given]
        for comm, device, source, target in zip(comms, devices, given, sums, strict=True):
            comm.all_reduce(source.data_ptr(), target.data_ptr(), source.numel(), kind, device.stream)
        until(lambda: all(comm.ready() for comm in comms))
        for device in devices:
            device.mark().wait()
        assert all(torch.equal(total, (given[0] + given[1]) + given[2]) for total in sums)
    for comm in comms:
        comm.abort()
        comm.abort()  # a second time is nothing
    assert devices[0].live() == Communicator.alive == 0


def test_an_abort_ends_what_waits_for_a_member_that_never_comes() -> None:
    library, device = Library(build()), HostDevice(build())
    alone = library.join(library.unique_id(), 2, 0)
    assert not alone.ready()
    alone.abort()
    first, second = members(library, 2)
    source, target = torch.ones(8), torch.zeros(8)
    first.all_reduce(source.data_ptr(), target.data_ptr(), 8, NcclType.FLOAT32, device.stream)
    until(first.ready)
    mark = device.mark()
    first.abort()
    mark.wait()  # the stream goes on
    second.abort()
    assert device.live() == Communicator.alive == 0


def test_members_that_reduce_different_buckets_are_an_error_and_so_is_a_call_before_the_last_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NCCL_SWITCHES", str(tmp_path))
    (tmp_path / "hold-launch").touch()
    library = Library(build())
    comms, devices = members(library, 2), [HostDevice(library.path) for _ in range(2)]
    source, target = torch.ones(8), torch.zeros(8)
    for comm, device, count in zip(comms, devices, (8, 7), strict=True):
        comm.all_reduce(source.data_ptr(), target.data_ptr(), count, NcclType.FLOAT32, device.stream)
    with pytest.raises(NcclError, match="in progress"):
        comms[1].all_reduce(source.data_ptr(), target.data_ptr(), 8, NcclType.FLOAT32, devices[1].stream)
    (tmp_path / "hold-launch").unlink()

    def refused() -> str:
        try:
            comms[0].ready()
        except NcclError as error:
            return str(error)
        return ""

    until(refused)
    assert "of rank 1 is of 7 elements, of rank 0 of 8" in refused()
    for comm in comms:
        comm.abort()


def test_a_library_that_cannot_be_used_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"has no ncclCommAbort, so it is no libnccl of 2\.17"):
        Library(build("-DWITHOUT_ABORT"))
    monkeypatch.setenv("FAKE_NCCL_VERSION", "21602")
    with pytest.raises(SettingsError, match=r"is NCCL 2\.16\.2") as old:
        Library(build())
    assert "pip install" in old.value.hint
    garbage = tmp_path / "libnccl.so.2"
    garbage.write_bytes(b"no library")
    with pytest.raises(SettingsError, match="cannot be loaded") as broken:
        nccllib.load(str(garbage))
    assert "FTAR_NCCL_LIBRARY" in broken.value.hint
    monkeypatch.setattr(nccllib, "find_nccl", lambda: None)
    with pytest.raises(SettingsError, match=r"no libnccl\.so\.2 here") as missing:
        nccllib.load()
    assert "data_plane='host'" in missing.value.hint


def test_the_config_is_that_of_2_17_which_every_later_library_takes() -> None:
    config = nccllib.Config.non_blocking()
    assert (config.size, ctypes.sizeof(config)) == (48, 48)
    offsets = {name: getattr(nccllib.Config, name).offset for name, _ in nccllib.Config._fields_}
    assert offsets == {
        **{"size": 0, "magic": 8, "version": 12, "blocking": 16, "cga_cluster_size": 20, "min_ctas": 24},
        **{"max_ctas": 28, "net_name": 32, "split_share": 40},
    }
    assert (config.magic, config.version, config.blocking, config.max_ctas) == (0xCAFEBEEF, 21700, 0, -(2**31))
