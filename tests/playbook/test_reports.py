"""What people and CI systems see of a run: JUnit XML, Markdown, and a page that a real browser draws."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from xml.etree import ElementTree as ET

import pytest

from ftctl.errors import UsageProblem
from ftctl.playbook.journal import Journal
from ftctl.report import html, junit, markdown
from ftctl.report.comparing import compare_runs
from ftctl.report.reading import Run, read_run
from ftctl.report.timeline import Span, _lanes, _speed, svg

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
EVIL = "<script>document.title='owned'</script> | a\x00b"


def lines_of(word: str, *, met: bool) -> Iterator[dict[str, object]]:
    """A run of 20 s: r1 is killed at 8 s and is back 4 s later."""
    yield {
        "kind": "run",
        "schema": 1,
        "name": "killed",
        "description": EVIL,
        "seed": 7,
        "environment": "lab",
        "repeat": 1,
    }
    yield {"kind": "hypothesis", "probe": "replicas.contributing == 3", "met": True, "detail": "is 3", "mono": 0.5}
    for tick in range(80):
        at = 1.0 + tick / 4
        away = 8.0 <= at < 12.0
        yield {
            "kind": "sample",
            "mono": at,
            "step": int(at * 5),
            "epoch": "1.2" if away else "1.3" if at >= 12 else "1.1",
            "contributors": 2 if away else 3,
            "replicas": {"r0": "contributing", "r1": "evicted" if away else "contributing"},
            "loss": 5.0 - at / 10,
            "step_ms": 200.0,
        }
        if tick == 28:
            aim = {"node": "node1", "nic": "", "replica": "r1", "rank": None, "repeat": 0}
            yield {"kind": "incident", "mono": 8.0, "number": 0, "what": "proc-kill", **aim}
            yield {
                "kind": "action",
                "mono": 8.0,
                "what": "inject",
                "incident": 0,
                "fault": "f-1",
                "target": "r1",
                "detail": EVIL,
            }
    cost = {"incident": 0, "what": "proc-kill", "aim": "r1 on node1", "repeat": 0}
    yield {
        "kind": "event",
        "event": {"time": 1008.0, "source": "coordinator", "kind": "replica.lost", "object": "r1", "reason": EVIL},
    }
    yield {"kind": "measured", **cost, "detect_ms": 30.0, "stall_ms": 120.0, "rejoin_s": 4.0, "steps_lost": 0}
    objective = {
        "objective": "stall_ms max",
        "limit": 100.0,
        "allowed": 300.0,
        "measured": 120.0,
        "count": 1,
        "met": met,
        "reason": "",
    }
    yield {
        "kind": "verdict",
        "passed": word == "passed",
        "word": word,
        "code": 0 if word == "passed" else 1,
        "reason": "" if word == "passed" else EVIL,
        "seconds": 20.0,
        "slower": 3.0,
        "objectives": [objective],
    }


def a_run(folder: Path, word: str = "missed", *, met: bool = False) -> Run:
    folder.mkdir(exist_ok=True)
    mono = 0.0
    texts = []
    for line in lines_of(word, met=met):
        mono = float(str(line.get("mono", mono)))
        texts.append(json.dumps({"time": 1000.0 + mono, "mono": mono, **line}))
    (folder / "journal.jsonl").write_text("\n".join(texts) + "\n")
    return read_run(folder)


def test_junit_says_what_failed_and_what_could_not_be_judged(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "a", "passed", met=True), a_run(tmp_path / "b"), a_run(tmp_path / "c", "no-steady-state")]
    root = ET.fromstring(junit.render(runs))
    assert [(s.get("tests"), s.get("failures"), s.get("errors")) for s in root] == [
        ("2", "0", "0"),
        ("2", "1", "0"),
        ("2", "0", "1"),
    ]
    assert root.get("tests") == "6"
    failure = root[1].find("testcase[@name='stall_ms max']/failure")
    assert failure is not None
    limit = "300 on a machine 3 times slower than its pace, 100 on others"
    assert failure.get("message") == f"measured 120, the limit is {limit}"
    assert root[2].find("testcase[@name='stall_ms max']/skipped") is not None


def test_markdown_keeps_its_tables_whole(tmp_path: Path) -> None:
    text = markdown.render([a_run(tmp_path / "a")])
    assert "up to 3 times slower than its pace" in text
    assert "| stall_ms max | 120 | 100, here 300 | 1 |" in text
    assert "0 of 1 playbooks passed" in text
    assert "<script" not in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (5, 6, 7), line


def test_a_timeline_shows_the_incident_where_it_was(tmp_path: Path) -> None:
    drawn = svg(a_run(tmp_path / "a"))
    root = ET.fromstring(drawn)
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert names.count("polyline") == 2, "speed and loss"
    (bar,) = [e for e in root.iter() if e.tag.endswith("rect") and e.get("rx") == "2"]
    x = 64 + (960 - 128) * 8.0 / 20.75
    assert float(bar.get("x") or 0) == pytest.approx(x, abs=1)
    assert float(bar.get("width") or 0) == pytest.approx((960 - 128) * 4.0 / 20.75, abs=1)

    text = (tmp_path / "a" / "journal.jsonl").read_text()
    late = {"time": 9000.0, "source": "node1", "kind": "fault.reverted", "object": "", "reason": "f-1 proc-kill"}
    line = json.dumps({"kind": "event", "time": 1021.0, "mono": 20.75, "event": late})
    (tmp_path / "a" / "journal.jsonl").write_text(text + line + "\n")
    assert 'width="832' not in svg(read_run(tmp_path / "a")), "a node whose clock is wrong stretches nothing"
    assert ">20 s<" in svg(read_run(tmp_path / "a"))

    away = [e for e in root.iter() if e.tag.endswith("g") and any(str(t.text).startswith("r1 evicted") for t in e)]
    assert len(away) == 1, "what became of each replica"
    assert float(away[0][1].get("x") or 0) == pytest.approx(x, abs=1)


def test_a_coordinator_that_begins_again_makes_no_spike() -> None:
    samples = [(float(t), {"step": 0 if t == 7 else 5 * t}) for t in range(20)]
    assert all(speed == pytest.approx(5.0) for _, speed in _speed(samples))
    back = [(float(t), {"step": 5 * t if t < 10 else 5 * (t - 8)}) for t in range(30)]
    assert min(speed for _, speed in _speed(back)) == 0, "a job that went back is shown as it was"


def test_labels_lie_on_no_other_and_within_the_picture() -> None:
    spans = [Span(float(at), at + 0.5, "proc-kill node1/rail0") for at in range(0, 100, 3)]
    lanes = _lanes(spans, 1.0, 100.0)
    assert sorted(s.begin for lane in lanes for s in lane) == [s.begin for s in spans][: sum(map(len, lanes))]
    for lane in lanes:
        ends = [(s.begin - 23, s.end) if s.end + 23 > 100 else (s.begin, s.end + 23) for s in lane]
        assert all(one[1] <= two[0] for one, two in pairwise(ends))


def test_a_run_that_goes_on_is_not_one_that_was_cut_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", lambda: (1000.0, 0.0))
    journal.write("run", schema=1, name="now")
    assert read_run(tmp_path).word == "running"
    assert "not over yet" in markdown.render([read_run(tmp_path)])
    journal.close()
    assert read_run(tmp_path).word == "cut off"


def test_a_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    page = html.render([a_run(tmp_path / "a")])
    assert "<script" not in page
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
    assert "url(" not in page


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (apt-get install chromium)")
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    """A real one, headless: what it made of the page, and that it complained of nothing."""
    page = tmp_path / "report.html"
    page.write_text(html.render([a_run(tmp_path / "a", "passed", met=True), a_run(tmp_path / "b")]), encoding="utf-8")
    shot = tmp_path / "shot.png"
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]

    def browse(*more: str) -> subprocess.CompletedProcess[str]:
        argv = [str(BROWSER), *flags, "--enable-logging=stderr", *more, page.as_uri()]
        return subprocess.run(argv, capture_output=True, text=True, timeout=240, check=True)

    seen = browse("--dump-dom", "--window-size=1120,1400")
    assert seen.stdout.count("<polyline") == 4
    assert "CONSOLE" not in seen.stderr, seen.stderr
    assert "<title>Chaos report: 1 of 2 passed</title>" in seen.stdout, "and no title of a script's"
    browse(f"--screenshot={shot}", "--window-size=1120,1400")
    picture = shot.read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 30_000, "more than an empty page"


STRANGE: tuple[object, ...] = (None, "x", -1, 1e308, float("nan"), [], {}, [1], {"a": 1}, True, "9" * 400, 2**70)


def strange(rng: Random, thing: dict[str, object]) -> None:
    """One value somewhere in it is another one, or missing."""
    key = rng.choice(list(thing))
    value = thing[key]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = value[0]
    if isinstance(value, dict) and value and rng.random() < 0.7:
        strange(rng, value)
    elif rng.random() < 0.3:
        del thing[key]
    else:
        thing[key] = rng.choice(STRANGE)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_stands_in_a_journal_is_a_report_or_a_complaint(tmp_path: Path, seed: int) -> None:
    """Journals travel: they are artifacts of CI, and come from disks that were full."""
    a_run(tmp_path)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    rng = Random(seed)
    for _ in range(3):
        number = rng.choice([n for n, line in enumerate(lines) if '"sample"' not in line or rng.random() < 0.1])
        record = json.loads(lines[number])
        strange(rng, record)
        lines[number] = json.dumps(record)
    (tmp_path / "journal.jsonl").write_text("\n".join(lines) + "\n")
    try:
        run = read_run(tmp_path)
    except UsageProblem:
        return
    ET.fromstring(junit.render([run]))
    assert "<h2>" in html.render([run])
    assert markdown.render([run])
    assert compare_runs([run], [run], tolerance=0.25)
