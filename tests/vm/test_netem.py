"""Faults that need netem, on a kernel that has it: the same tests as everywhere, in a virtual machine (`make vm`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from .machine import CHECKOUT, END, build, lacking, run

KERNEL = Path(os.environ.get("VM_KERNEL", CHECKOUT / "build/vm/kernel"))
TIMEOUT_S = 1800  # liveness only: without KVM, and beside other work, minutes
CONTRACT = [
    "test_a_fault_is_seen_while_in_force_and_not_seen_after_its_undo",
    "test_undoing_twice_or_without_a_fault_does_no_harm",
    "test_the_undo_survives_its_way_over_the_disk",
]
TESTS = [
    "tests/agents/test_netem_faults.py",
    *(
        f"tests/agents/test_fault_contract.py::{test}[kernel-{kind}]"
        for test in CONTRACT
        for kind in ("link-delay", "link-corrupt", "link-reorder")
    ),
]


@pytest.mark.vm
@pytest.mark.timeout(TIMEOUT_S + 120)
def test_faults_that_need_netem_do_what_they_say_and_go_without_a_trace(tmp_path: Path) -> None:
    missing = lacking(KERNEL)
    if missing:
        pytest.skip(missing)
    said = run(KERNEL, build(KERNEL, tmp_path, TESTS), TIMEOUT_S)
    sys.stdout.write(said)
    assert f"{END} 0" in said
    assert "SKIPPED" not in said
