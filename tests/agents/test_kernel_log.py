"""From a line of the kernel log to a verdict and to what the shipped policy decides, for every row of the table."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_agent import live_agent, until

from agents.api.models import Verdict
from agents.api.policyfile import read as policy
from agents.health.desk import HealthDesk
from agents.health.kernellog import SwitchLine, XidLine, line, record, slot
from agents.health.xidtable import read as xid_table
from agents.monitors.kernellog import KernelLog
from agents.monitors.xids import XidDesk
from agents.policy.engine import Finding, Fleet, Past, decide

GONE = 2**22 + 1  # no process can have this number
# Behind "NVRM: Xid (PCI:0000:04:00): ": what is written, health, suggested action, what the policy does.
ROWS = [
    ("8, pid=1234, name=python, Channel 00000010", "degraded", "restart", "restart"),
    ("13, pid=1234, name=python, Graphics SM Warp Exception on (GPC 0, TPC 1, SM 0): Out Of Range Address",
     "degraded", "restart", "restart"),
    ("31, pid=1234, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ "
     "0x7f4a_00000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ", "degraded", "restart", "restart"),
    ("32, pid=1234, name=python, Channel ID 00000008 intr0 00040000", "degraded", "restart", "restart"),
    ("38, pid=1234, name=python, Ch 00000001, engmask 00000001", "healthy", "watch", "watch"),
    (f"43, pid={GONE}, name=python, Ch 00000010", "degraded", "restart", "restart"),
    (f"43, pid={os.getpid()}, name=python, Ch 00000010", "degraded", "watch", "watch"),
    ("44, pid=1234, name=python, Ch 00000010", "healthy", "watch", "watch"),
    ("45, pid=1234, name=python, Ch 00000010", "healthy", "watch", "watch"),
    ("45, pid=1234, name=python, Ch 00000010, caused by previous Xid 79", "unhealthy", "evict_node", "evict"),
    ("46, pid='<unknown>', name=<unknown>, GPU stopped processing", "unhealthy", "evict", "evict"),
    ("48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE) has been detected on GPU in the "
     "framebuffer at partition 2, subpartition 0.", "unhealthy", "evict", "evict"),
    ("54, GPU external power is not connected", "unhealthy", "evict", "evict"),
    ("61, pid='<unknown>', name=<unknown>, 0cde(3098) 00000000 00000000", "unhealthy", "evict", "evict"),
    ("62, pid='<unknown>', name=<unknown>, 0cb5(2d50) 8503d428 00000000", "unhealthy", "evict", "evict"),
    ("63, pid='<unknown>', name=<unknown>, Row Remapper: New row (0x0000000000abcdef) marked for remapping, reset "
     "gpu to activate.", "healthy", "reset_idle", "watch"),
    ("64, pid='<unknown>', name=<unknown>, Row Remapper: Unable to remap row", "unhealthy", "evict", "evict"),
    ("68, pid=1234, name=python, Ch 00000005", "degraded", "restart", "restart"),
    ("69, pid=1234, name=python, Class Error: ChId 0008, Class 0000c7c0", "degraded", "restart", "restart"),
    ("74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 6(0x10000, 0x0, 0x0, 0x0)",
     "unhealthy", "evict", "evict"),
    ("79, pid=1234, name=python, GPU has fallen off the bus.", "unhealthy", "evict_node", "evict"),
    ("92, pid='<unknown>', name=<unknown>, High single-bit ECC error rate", "healthy", "watch", "watch"),
    ("94, pid=1234, name=python, Contained: SM (0x1). RST: No, D-RST: No", "degraded", "restart", "restart"),
    ("95, pid=1234, name=python, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No", "unhealthy", "evict", "evict"),
    ("109, pid=1234, name=python, Ch 00000020, errorString CTX SWITCH TIMEOUT, Info 0x4c014",
     "degraded", "restart", "restart"),
    ("110, pid='<unknown>', name=<unknown>, Security fault", "unhealthy", "evict", "evict"),
    ("119, pid=1234, name=python, Timeout after 6s of waiting for RPC response from GPU0 GSP! Expected function 76",
     "unhealthy", "evict", "evict"),
    ("120, pid='<unknown>', name=<unknown>, GSP task exception", "unhealthy", "evict", "evict"),
    ("121, pid='<unknown>', name=<unknown>, C2C Link corrected error", "healthy", "watch", "watch"),
    ("136, pid='<unknown>', name=<unknown>, NVLink training failed on link 4", "unhealthy", "evict", "evict"),
    ("137, pid=1234, name=python, NVLink FLA privilege error", "degraded", "restart", "restart"),
    ("140, pid='<unknown>', name=<unknown>, Uncorrectable ECC Error", "unhealthy", "evict", "evict"),
    ("143, GPU Initialization Failure", "unhealthy", "evict", "evict"),
    *[
        (f"{code}, {unit} {severity} XC0 i0 Link 00 (0x000045c0 0x00000000 0x00000000)", health, action, done)
        for code, unit in zip(range(144, 151), ["SAW_MVB", "RLW_CTRL", "TLW_RX", "TREX", "NVLPW_CTRL", "NETIR_LINK_EVT",
                                                "MSE_WATCHDOG"], strict=True)
        for severity, health, action, done in [("Fatal", "unhealthy", "evict", "evict"),
                                               ("Nonfatal", "degraded", "watch", "watch")]
    ],
    ("151, Key rotation error", "unhealthy", "evict", "evict"),
    ("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "unhealthy", "evict", "evict"),
    ("154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
     "unhealthy", "evict_node", "evict"),
    ("154, GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", "unhealthy", "drain", "drain"),
    ("154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", "unhealthy", "evict", "evict"),
    ("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", "healthy", "watch", "watch"),
    ("155, pid='<unknown>', name=<unknown>, NVLINK: SW-Defined Error on link 3", "unhealthy", "evict", "evict"),
    ("156, Resource Retirement Event", "unhealthy", "evict", "evict"),
    ("157, Resource Retirement Failure", "healthy", "watch", "watch"),
    ("158, GPU Fatal Timeout", "unhealthy", "evict", "evict"),
    ("160, Channel Retirement Event", "healthy", "watch", "watch"),
    ("161, Channel Retirement Failure", "healthy", "watch", "watch"),
    *[(f"{code}, Power Smoothing state", "healthy", "watch", "watch") for code in range(162, 166)],
    ("167, PCIE_FATAL_TIMEOUT", "unhealthy", "evict", "evict"),
    ("169, SEC2 halt", "unhealthy", "evict", "evict"),
    ("171, DRAM uncorrectable error detail", "unhealthy", "evict", "evict"),  # its 48 was not seen
    ("172, SRAM uncorrectable error detail", "unhealthy", "evict", "evict"),
    ("4711, something new", "degraded", "check", "watch"),
]  # fmt: skip


TABLE, POLICY = xid_table(), policy()


class Heard:
    """A health desk that the log is told to, line by line."""

    def __init__(self) -> None:
        self.news: list[Verdict] = []
        self.desk = HealthDesk("node1", lambda *_event, **_more: None)
        self.desk.listen(lambda news: self.news.append(news.verdict))
        place = {"0000:04:00": (3, "GPU-3")}.get
        self.log = KernelLog(Path("/nowhere"), self.desk, XidDesk(self.desk, TABLE), place)

    def hear(self, text: str, prio: int = 4) -> None:
        counted: dict[Any, Any] = {}
        self.log._count(counted, f"{prio},77,5678,-;{text}".encode())
        for (found, fault), (count, said) in counted.items():
            self.log._tell(found, fault, said, count)

    def xid(self, rest: str) -> Verdict:
        self.hear(f"NVRM: Xid (PCI:0000:04:00): {rest}")
        return self.news[-1]

    def decisions(self) -> list[str]:
        """What the policy does about all that was told, in act mode."""
        done: list[str] = []
        seen: list[tuple[float, Finding]] = []
        for verdict in self.news:
            finding = Finding(
                f"node1/{verdict.object}", verdict.kind, verdict.health.value, verdict.code, verdict.action.value
            )
            decision = decide(POLICY, "act", finding, Past(seen), Fleet(4), now=1000.0)
            seen.append((1000.0, finding))
            done.append(decision.action)
        return done


@pytest.mark.parametrize(
    ("rest", "health", "action", "done"), ROWS, ids=[f"{n} {row[0][:2]}" for n, row in enumerate(ROWS)]
)
def test_a_line_is_a_verdict_and_a_decision(rest: str, health: str, action: str, done: str) -> None:
    heard = Heard()
    verdict = heard.xid(rest)
    code = int(rest.partition(",")[0])
    assert (verdict.object, verdict.uuid, verdict.code) == ("gpu 3", "GPU-3", f"xid.{code}")
    assert (verdict.health.value, verdict.action.value) == (health, action)
    assert verdict.evidence == [f"NVRM: Xid (PCI:0000:04:00): {rest}"]
    assert verdict.incident
    assert heard.decisions() == [done]


def test_every_code_of_the_table_has_a_line() -> None:
    assert set(TABLE.rows) <= {int(rest.partition(",")[0]) for rest, *_more in ROWS}


def test_what_comes_again_asks_for_more() -> None:
    unit = "13, pid={}, name=python, Graphics SM Warp Exception on (GPC {}, TPC 1, SM 0): Out Of Range Address"
    heard, now = Heard(), 100.0
    for gpc, pid, action in [(0, 1, "restart"), (1, 2, "restart"), (0, 3, "evict")]:
        heard.desk._clock = At(now)
        assert heard.xid(unit.format(pid, gpc)).action.value == action
        now += 100
    for code in (31, 109):
        heard = Heard()
        for pid, action in [(1, "restart"), (2, "evict")]:
            heard.desk._clock = At(now)
            assert heard.xid(f"{code}, pid={pid}, name=python, Ch 00000008").action.value == action
            now += 3600
        assert heard.decisions()[-1] == "evict"
    later = Heard()
    later.desk._clock = At(0.0)
    later.xid("31, pid=1, name=python, Ch 00000008")
    later.desk._clock = At(86_500.0)
    assert later.xid("31, pid=2, name=python, Ch 00000008").action.value == "restart"


class At:
    def __init__(self, s: float) -> None:
        self.s = s

    def boot_s(self) -> float:
        return self.s

    def wall_s(self) -> float:
        return 1_700_000_000 + self.s

    def boot_id(self) -> str:
        return "boot"


def test_a_consequence_follows_what_was_seen_and_is_in_its_incident() -> None:
    heard = Heard()
    first = heard.xid("149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x000045c0 0x00000000)")
    second = heard.xid("45, pid=1234, name=python, Ch 00000010, caused by previous Xid 149")
    assert (second.incident, second.health.value, second.action.value) == (first.incident, "healthy", "watch")
    assert "follows from Xid 149" in second.reason
    heard.xid("48, An uncorrectable double bit error (DBE) has been detected")
    assert heard.xid("171, DRAM detail").health.value == "healthy"  # 48 was judged already
    assert heard.xid("149, NETIR_LINK_EVT Nonfatal XC0 i0 Link 00").code == "xid.171"  # milder: no news
    assert heard.decisions() == ["evict", "watch", "evict", "watch"]


def test_nvml_and_the_log_tell_of_one_xid() -> None:
    from agents.monitors.nvml_child import XidSeen

    heard = Heard()
    heard.xid("79, pid=1234, name=python, GPU has fallen off the bus.")
    heard.log._xids.seen(XidSeen(3, "GPU-3", 79, 0.0))
    heard.hear("NVRM: GPU 0000:04:00.0: GPU has fallen off the bus.")
    (verdict,) = heard.desk.verdicts()
    assert (verdict.count, len(verdict.evidence), len(heard.news)) == (1, 3, 1)
    heard.xid("79, pid=1234, name=python, GPU has fallen off the bus.")
    assert heard.desk.verdicts()[0].count == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.", XidLine("0000:b3:00", 79, numbered=False)),
        ("NVRM: Xid (0000:03:00): 8, Channel 00000001", XidLine("0000:03:00", 8)),
        ("NVRM: Xid (PCI:0004:B3:00): 79, pid='77', name=a b", XidLine("0004:b3:00", 79, 77, "a b")),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
         SwitchLine(3, 20034, True, "Link 30")),
        ("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error",
         SwitchLine(0, 12028, False, "Link 32")),
        ("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.124.06", None),
        ("NVRM: Xid (PCI:0000:04:00): ", None),
        ("NVRM: Xid (PCI:0000:04:00): 99999999999, x", None),
        ("NVRM: Xid (PCI:0000:", None),
        ("", None),
    ],
)  # fmt: skip
def test_patterns(text: str, found: object) -> None:
    assert line(text) == found


def test_a_switch_has_verdicts_too() -> None:
    heard = Heard()
    heard.hear("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
    (verdict,) = heard.news
    assert (verdict.kind, verdict.object, verdict.code) == ("nvswitch", "nvswitch 3", "sxid.20034")
    assert heard.decisions() == ["evict"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"4", b"4,1,2", b"4,1,2,-", b"garbage", b"\xff\xfe\x00", b"x,1,2,-;text", b"4,1,2,-text", b";" * 9000,
     b" SUBSYSTEM=pci", b"9999999999,1,1,-;x"],
)  # fmt: skip
def test_what_is_no_record(raw: bytes) -> None:
    assert record(raw) is None


def test_user_space_is_heard_with_the_mark_of_a_fault_only() -> None:
    forged = "NVRM: Xid (PCI:0000:04:00): 79, pid=1, name=x, GPU has fallen off the bus."
    heard = Heard()
    heard.hear(forged, prio=12)  # facility 1
    assert heard.news == []
    heard.hear(f"{forged} (injected by ftctl fault f-1a2b3c4d)", prio=12)
    assert (heard.news[0].injected, heard.news[0].fault) == (True, "f-1a2b3c4d")


def test_properties_and_slots() -> None:
    told = record(b"4,1,2,-;NVRM: x\n SUBSYSTEM=pci\n DEVICE=+pci:0000:04:00.0")
    assert told is not None
    assert (told.kernel, told.text) == (True, "NVRM: x")
    assert slot("00000000:B3:00.0") == slot("0000:b3:00") == "0000:b3:00"


LINE = "4,{},5678,-;NVRM: Xid (PCI:0000:04:00): 31, pid=4242, name=python, Ch 00000008, intr 00000000. MMU Fault\n"


def pour(pipe: int, lines: int, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Equal lines, as fast as they are taken; before them garbage, a line in two pieces, and one that is too long."""
    os.write(pipe, b"\xff\xfegarbage\n4,1,2,-;NVRM: Xid (PCI:0000:05:00): 4711, half ")
    time.sleep(0.05)
    os.write(pipe, b"a line\n" + b"x" * 20_000 + b"\n" + b"\n")
    for start in range(0, lines, 1000):
        data = "".join(LINE.format(number) for number in range(start, start + 1000)).encode()
        while data:
            data = data[os.write(pipe, data) :]
        if start % 20_000 == 0:
            meanwhile()


def test_a_flood_of_equal_lines_is_one_incident_told_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kmsg")
    heard = Heard()
    log = KernelLog(tmp_path / "kmsg", heard.desk, heard.log._xids, {"0000:04:00": (3, "GPU-3")}.get)
    log.start()
    pipe = os.open(tmp_path / "kmsg", os.O_WRONLY)
    try:
        pour(pipe, 20_000)

        def counts() -> dict[str, int]:
            return {verdict.object: verdict.count for verdict in heard.desk.verdicts()}

        until(lambda: counts() == {"gpu 0000:05:00": 1, "gpu 3": 20_000}, "all lines are counted", 60)
        assert sorted(verdict.object for verdict in heard.news) == ["gpu 0000:05:00", "gpu 3"]
        assert heard.desk.answer().monitors[0].ok
    finally:
        os.close(pipe)
        log.close()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_800_000_lines_in_a_real_agent_that_answers_all_the_while() -> None:
    with live_agent() as agent:
        os.mkfifo(agent.root / "kmsg")
        agent.settings["kernel_log"] = str(agent.root / "kmsg")
        agent.start()
        pipe = os.open(agent.root / "kmsg", os.O_WRONLY)
        with agent.client() as client:
            pour(pipe, 800_000, lambda: client.get("/healthz").raise_for_status())
            os.close(pipe)

            def counts() -> dict[str, int]:
                verdicts = client.get("/v1/health").json()["verdicts"]
                return {v["object"]: v["count"] for v in verdicts if v["kind"] == "gpu"}

            until(lambda: counts().get("gpu 0000:04:00") == 800_000, "all lines are counted", 300)
            assert len(client.get("/v1/health").json()["incidents"]) == 2
            events = client.get("/v1/events").json()["events"]
            told = [e for e in events if e["object"].endswith("0000:04:00") and e["kind"].startswith("gpu.")]
            assert len(told) == 1
            assert client.get("/v1/node").json()["agent"]["rss_mb"] <= 100


def test_a_log_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    desk = HealthDesk("node1", lambda *_event, **_more: None)
    log = KernelLog(tmp_path / "none", desk, XidDesk(desk, TABLE), lambda _pci: None)
    log.start()
    try:
        until(lambda: bool(desk.answer().monitors), "the note")
        (monitor,) = desk.answer().monitors
        assert not monitor.ok
        assert "No such file" in monitor.note
        assert "NVML only" in monitor.note
    finally:
        log.close()
