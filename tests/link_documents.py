"""Documents as a status socket gives them (ftar_core/wire/linkstatus.py), for tests of who reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


def rail(index: int, state: str = "UP", **more: Any) -> dict[str, Any]:
    base = {
        "rail": index, "address": f"10.1.{index}.2", "state": state, "reason": "connected", "since_s": 9.0, "flaps": 0,
        "bytes": 1000, "active": False, "hold_left_ms": 0.0, "detect_ms": -1.0, "retransmits": 0,
    }  # fmt: skip
    return {**base, **more}


def link(number: int, *rails: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": number, "peer": "p1", "direction": "out", "resumes": 0, "rails": list(rails), **more}


def change(seq: int, to: str = "DOWN", **more: Any) -> dict[str, Any]:
    base = {
        "seq": seq, "age_s": 0.5, "kind": "rail", "links": 64, "peer": "p1", "direction": "out", "rail": "rail0",
        "from": "UP", "to": to, "reason": "no carrier", "detect_ms": 2.0,
    }  # fmt: skip
    return {**base, **more}


def document(links: Sequence[dict[str, Any]] = (), changes: Sequence[dict[str, Any]] = (), **more: Any) -> bytes:
    base = {
        "schema": 2, "pid": 100, "kind": "nccl", "job": "llm", "name": "p0", "rank": "3", "age_s": 60.0,
        "mode": "backup", "merge_ms": 100.0,
        "rails": [{"name": f"rail{i}", "device": f"eth{i}", "address": f"10.1.{i}.1", "carrier": True} for i in (0, 1)],
        "changes": list(changes), "links_total": len(links), "links": list(links), "left_out": 0,
    }  # fmt: skip
    return msgspec.json.encode({**base, **more}) + b"\n"
