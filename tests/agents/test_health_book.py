"""The incident book: what belongs together, what is told once, what is forgotten. Time is a number here."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from agents.api.words import Action, Health
from agents.health.causes import Moment
from agents.health.incidents import MAX_CAUSES, MAX_OBJECTS, IncidentBook
from agents.health.signals import Ends, Observed, Repeat, Signal

XID31 = Signal("gpu", "gpu 3", "xid.31", Health.DEGRADED, "MMU page fault", Action.RESTART, process="100",
               repeat=Repeat(2, 86_400, Action.EVICT))  # fmt: skip
XID79 = Signal("gpu", "gpu 3", "xid.79", Health.UNHEALTHY, "fell off the bus", Action.EVICT_NODE, ends=Ends.RECOVERY)
LOST = Signal("gpu", "gpu 3", "gpu.lost", Health.UNHEALTHY, "GPU is lost", Action.EVICT)
WELL = Observed("gpu", "gpu 3", "answers")
SICK = Observed("gpu", "gpu 3", "lost", Health.UNHEALTHY, recovered=False, signals=(LOST,))
NO_CARRIER = Signal("nic", "nic rail0", "nic.carrier", Health.UNHEALTHY, "no carrier", Action.CHECK)


def at(s: float) -> Moment:
    return Moment(s, 1_700_000_000 + s)


@pytest.fixture
def book() -> IncidentBook:
    numbers = itertools.count(1)
    return IncidentBook("node1", lambda: f"i-{next(numbers)}")


def told(book: IncidentBook) -> list[tuple[str, str, str]]:
    return [(news.verdict.code, news.verdict.health.value, news.verdict.incident) for news in book.news()]


def test_an_xid_and_the_lost_gpu_are_one_incident_that_ends_when_the_gpu_is_well_again(book: IncidentBook) -> None:
    book.see(at(0), "gpus", [WELL])
    assert told(book) == []
    book.occur(at(1), XID79)
    book.see(at(2), "gpus", [SICK])
    assert told(book) == [("xid.79", "unhealthy", "i-1"), ("gpu.lost", "unhealthy", "i-1")]
    assert [i.codes for i in book.incidents(at(2))] == [["xid.79", "gpu.lost"]]
    book.see(at(30), "gpus", [WELL])
    news = book.news()
    assert [(n.verdict.health.value, n.verdict.incident, n.over) for n in news] == [("healthy", "i-1", True)]
    assert "answers" in news[0].verdict.reason
    (incident,) = book.incidents(at(30))
    assert (incident.closed, incident.health, incident.action) == (at(30).wall, Health.UNHEALTHY, Action.EVICT_NODE)
    assert [(v.health, v.incident) for v in book.verdicts(at(31))] == [(Health.HEALTHY, "")]


def test_a_reading_as_old_as_the_line_proves_nothing(book: IncidentBook) -> None:
    """The driver writes the line before it knows that the GPU is lost."""
    book.occur(at(1), XID79)
    book.see(at(2), "gpus", [WELL])
    assert book.verdicts(at(2))[0].health is Health.UNHEALTHY
    book.see(at(20), "gpus", [replace(WELL, recovered=False)])  # an old driver, which cannot say so
    assert book.verdicts(at(20))[0].health is Health.UNHEALTHY
    book.see(at(21), "gpus", [WELL])
    assert book.verdicts(at(21))[0].health is Health.HEALTHY


def test_800_000_equal_lines_are_one_incident(book: IncidentBook) -> None:
    for number in range(8000):
        book.occur(at(number / 1000), replace(XID31, evidence=(f"line {number}",)), count=100)
    assert told(book) == [("xid.31", "degraded", "i-1")]
    (verdict,) = book.verdicts(at(8))
    assert (verdict.count, verdict.times) == (800_000, 1)
    assert verdict.evidence[0] == "line 0"
    assert verdict.evidence[-1] == "line 7999"
    assert len(verdict.evidence) <= 8


def test_the_second_time_within_a_day_asks_for_more(book: IncidentBook) -> None:
    book.occur(at(0), XID31)
    assert book.news()[0].verdict.action is Action.RESTART
    book.tick(at(100))
    assert book.verdicts(at(100)) == []  # nobody reads this GPU, so there is nothing to say of it
    assert [n.over for n in book.news()] == [True]
    book.occur(at(7200), XID31)
    verdict = book.news()[0].verdict
    assert (verdict.action, verdict.times, verdict.incident) == (Action.EVICT, 2, "i-2")
    book.tick(at(7300))
    book.news()
    book.occur(at(7200 + 90_000), XID31)
    assert book.news()[0].verdict.action is Action.RESTART


def test_the_same_fault_of_the_restarted_process_is_a_new_one_and_of_its_other_ranks_is_not(book: IncidentBook) -> None:
    book.occur(at(0), XID31)
    book.occur(at(1), replace(XID31, process="101"))  # another rank, of the same failure
    assert len(book.news()) == 1
    book.occur(at(20), replace(XID31, process="200"))
    assert [(n.verdict.times, n.verdict.action) for n in book.news()] == [(2, Action.EVICT)]
    assert len(book.incidents(at(20))) == 1


def test_readings_are_told_when_they_change_and_not_each_second(book: IncidentBook) -> None:
    rail = Observed("nic", "nic rail0", "up")
    down = replace(rail, health=Health.UNHEALTHY, reason="no carrier", signals=(NO_CARRIER,))
    errors = replace(NO_CARRIER, code="nic.errors", health=Health.DEGRADED, reason="11 errors a second")
    worse = replace(errors, reason="99 errors a second")
    for number, seen in enumerate(
        [rail, down, down, replace(rail, signals=(errors,)), replace(rail, signals=(worse,))]
    ):
        book.see(at(number), "nics", [seen])
    book.see(at(9), "nics", [rail])
    assert told(book) == [
        ("nic.carrier", "unhealthy", "i-1"),
        ("nic.errors", "degraded", "i-1"),
        ("nic.errors", "degraded", "i-1"),  # what is left when the carrier is back
        ("", "healthy", "i-1"),
    ]
    assert book.verdicts(at(9))[0].reason == "up"


def test_what_is_only_recorded_ends_without_a_word(book: IncidentBook) -> None:
    book.occur(at(0), replace(XID31, code="xid.92", health=Health.HEALTHY, action=Action.WATCH, repeat=None))
    assert told(book) == [("xid.92", "healthy", "i-1")]
    book.tick(at(100))
    assert told(book) == []
    assert book.incidents(at(100))[0].closed


def test_what_a_fault_did_is_over_with_the_fault(book: IncidentBook) -> None:
    book.occur(at(0), replace(XID79, injected=True, fault="f-1"))
    book.tick(at(1), {"f-1"})
    assert book.incidents(at(1))[0].injected
    assert book.verdicts(at(1))[0].fault == "f-1"
    book.tick(at(2), set())
    assert book.incidents(at(2))[0].why_closed == "the injected fault is over"


def test_an_operator_clears_what_happened_and_not_what_still_is(book: IncidentBook) -> None:
    book.occur(at(0), replace(XID79, ends=Ends.CLEAR))
    book.see(at(1), "gpus", [SICK])
    assert book.clear(at(2), "gpu", "gpu 3", "cleared by ann: reset") == 1
    assert [v.code for v in book.verdicts(at(2))] == ["gpu.lost"]


def test_a_source_takes_back_its_own_words_only(book: IncidentBook) -> None:
    book.occur(at(0), replace(XID79, source="gpud"))
    book.occur(at(0), replace(XID79, source="dcgm"))
    assert book.retract(at(1), "gpud", "well", of=lambda signal: True) == 1
    assert [v.source for v in book.verdicts(at(1))] == ["dcgm"]


def test_neither_objects_nor_codes_grow_without_bound(book: IncidentBook) -> None:
    for number in range(3 * MAX_OBJECTS):
        book.occur(at(0), replace(XID79, object=f"gpu {number}"))
    assert len(book.things) <= MAX_OBJECTS + 1
    for number in range(200):
        book.occur(at(0), replace(XID79, code=f"xid.{number}"))
    assert len(book.of(at(0), book.things["gpu", "gpu 3"])) <= MAX_CAUSES + 1
    for number in range(2500):
        book.occur(at(1 + number), replace(XID31, object=f"x{number % 7}", code=f"c{number}"))
        book.tick(at(1 + number))
    assert len(book.history) <= 2048
    assert len(book.closed) <= 200
