"""JUnit XML, as CI systems read it: a suite a playbook, a case an objective, and one for the run itself.

A missed objective is a failure; a run that did not come to be judged (no steady state, refused, stopped, interrupted, a
fault that may still be in force) is an error, so that a CI page tells the two apart.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from ftctl.playbook.journal import Record
from ftctl.report.reading import Run

# XML 1.0, section 2.2: what may not stand in a document, not even escaped
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(runs: Sequence[Run]) -> str:
    suites = ET.Element("testsuites", name="ftctl chaos")
    totals = [0, 0, 0]
    for run in runs:
        suite, counts = _suite(run)
        suites.append(suite)
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
    suites.set("tests", str(totals[0]))
    suites.set("failures", str(totals[1]))
    suites.set("errors", str(totals[2]))
    suites.set("time", f"{sum(run.seconds for run in runs):.3f}")
    ET.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"


def _suite(run: Run) -> tuple[ET.Element, tuple[int, int, int]]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(run.records[0]["time"]))
    suite = ET.Element("testsuite", name=run.name, timestamp=stamp, time=f"{run.seconds:.3f}")
    properties = ET.SubElement(suite, "properties")
    for name in ("seed", "environment", "repeat", "file"):
        ET.SubElement(properties, "property", name=name, value=_clean(run.head.get(name, "")))
    ET.SubElement(properties, "property", name="slower", value=f"{run.slower:g}")
    case = ET.SubElement(suite, "testcase", classname=f"chaos.{run.name}", name="run", time=f"{run.seconds:.3f}")
    failures = errors = 0
    if run.word not in ("passed", "missed"):
        kind = "failure" if run.word == "failed" else "error"
        failures, errors = int(kind == "failure"), int(kind == "error")
        ET.SubElement(case, kind, type=run.word, message=_clean(run.reason or run.word)).text = _clean(_story(run))
    for objective in run.objectives:
        case = ET.SubElement(
            suite, "testcase", classname=f"chaos.{run.name}", name=_clean(objective["objective"]), time="0"
        )
        measured = objective["measured"]
        said = f"measured {'nothing' if measured is None else f'{measured:g}'}, the limit is {_limit(run, objective)}"
        if objective["met"]:
            ET.SubElement(case, "system-out").text = said
        elif run.word in ("passed", "missed"):
            failures += 1
            ET.SubElement(case, "failure", type="objective", message=_clean(objective["reason"] or said)).text = said
        else:
            ET.SubElement(case, "skipped", message=_clean(f"the run is {run.word}"))
    suite.set("tests", str(1 + len(run.objectives)))
    suite.set("failures", str(failures))
    suite.set("errors", str(errors))
    return suite, (1 + len(run.objectives), failures, errors)


def _limit(run: Run, objective: Record) -> str:
    limit, allowed = objective["limit"], objective.get("allowed", objective["limit"])
    grown = f"{allowed:g} on a machine {run.slower:g} times slower than its pace, {limit:g} on others"
    return f"{limit:g}" if limit == allowed else grown


def _story(run: Run) -> str:
    """The last things the run did."""
    return "\n".join(
        _line(run, record)
        for record in [r for r in run.records if r["kind"] in ("note", "hypothesis", "action", "incident")][-20:]
    )


def _line(run: Run, record: Record) -> str:
    what = record.get("text") or record.get("probe") or record.get("what")
    return f"{run.since(record):8.2f} s  {record['kind']}: {what} {record.get('detail', '')}".rstrip()


def _clean(text: object) -> str:
    return _FORBIDDEN.sub(" ", str(text))
