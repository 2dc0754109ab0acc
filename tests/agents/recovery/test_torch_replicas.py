"""Forking after `import torch` is only worth it if torch, the native core and the example work in the child."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from .conftest import Node, wait_for

pytest.importorskip("torch")


def test_training_works_in_forked_replicas(node: Node, tmp_path: Path) -> None:
    """One fork server for all, as importing torch takes seconds; the first optimizer would import torch._dynamo."""
    core = pytest.importorskip("ftar_core.native._core", reason="the native core is not built")
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("0123456789abcdef0123456789abcdef", encoding="ascii")
    node.preload = ["torch_replica", "torch._dynamo", "ftar_core.training.example"]
    for threads in ("1", "2"):
        node.replica(f"t{threads}", str(tmp_path / threads), module="torch_replica", OMP_NUM_THREADS=threads)
    example = "ftar_core.training.example"
    node.replica("lost", "--steps", "1", module=example, FTAR_COORDINATOR="")
    reach = {"FTAR_COORDINATOR": "127.0.0.1:9", "FTAR_JOB": "demo", "FTAR_TOKEN_FILE": str(token)}
    node.replica("waits", module=example, OMP_NUM_THREADS="1", **reach)
    node.start()

    found = {}
    for threads in ("1", "2"):
        view = node.until(f"t{threads}", "exited")
        assert view.exit_code == 0, node.log(f"t{threads}")
        found[threads] = json.loads((tmp_path / threads).read_text(encoding="utf-8"))
    assert not node.said("forkserver.threads"), "none of the imports starts a thread"
    assert not node.said("forkserver.import-failed")
    for threads, facts in found.items():
        assert facts["imported_by"] == node.server_pid("t1") != facts["pid"]
        assert facts["threads"] == int(threads)
        assert facts["losses"] == sorted(facts["losses"], reverse=True)
        if hasattr(core, "Engine"):
            assert facts["endpoints"][0][1] == "127.0.0.1"
    assert found["1"]["losses"] == pytest.approx(found["2"]["losses"], rel=1e-5)
    assert found["1"]["product"] == pytest.approx(found["2"]["product"], rel=1e-4)

    # The example without its environment: a clear line, code 2, and no restart.
    lost = node.until("lost", "failed")
    assert lost.exit_code == 2
    assert "FTAR_" in lost.reason
    assert "Traceback" not in node.log("lost")

    # With it, but without a coordinator, it waits; killed, it starts again.
    first = node.until("waits", "running")
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    second = node.until("waits", "running", restarts=1)
    assert second.pid != first.pid
    assert node.supervisor is not None
    node.supervisor.stop_replica("waits")
    node.until("waits", "stopped")
    wait_for(lambda: node.view("waits").pid is None)
