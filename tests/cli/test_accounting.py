"""Where a job's time went, as `ftctl status` says it: a line that fits, a table that adds up, a document."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.api import models as m
from ftctl.render.accounting import line, permille

from .conftest import Run
from .fake_agent import FakeCluster

SECOND = 1_000_000


def account(*spent: tuple[Any, ...], late: m.TimeSpent | None = None) -> m.JobAccount:
    """(category, cause, seconds, count)"""
    entries = [m.TimeSpent(category=c, cause=w, us=round(s * SECOND), count=n) for c, w, s, n in spent]
    total = sum(entry.us for entry in entries)
    good = sum(entry.us for entry in entries if entry.category == "productive")
    return m.JobAccount(
        since=1.0, total_us=total, spent=entries, effective=good / total if total else None, calm_us=200_000, late=late
    )


STORMY = account(
    ("productive", None, 7776.0, 38000),
    ("starting", None, 8.0, 1),
    ("stalled", "killed", 88.0, 3),
    ("stalled", "min-replicas", 3.0, 1),
    ("stalled", "rejoin", 40.0, 4),
    ("degraded", "killed", 50.0, 1000),
    ("degraded", "drained", 22.0, 400),
    ("recomputed", "killed", 4.0, 3),
    ("slow", None, 9.0, 20),
)


def give(cluster: FakeCluster, accounting: m.JobAccount | None) -> None:
    assert cluster.job is not None
    cluster.job.accounting = accounting


def test_the_line_names_the_largest_losses_and_fits_a_terminal(ftctl: Run, cluster: FakeCluster) -> None:
    give(cluster, STORMY)
    page = ftctl("status").out.splitlines()
    (said,) = [text for text in page if text.startswith("effective")]
    assert said == "effective 97.2 % of 2h13m  lost: 1.1 % killed (3), 0.9 % degraded, 0.8 % other"
    assert page[0].startswith("job main  running")
    assert page[1] == said


@pytest.mark.parametrize(
    ("accounting", "said"),
    [
        (account(), "effective: nothing is counted before the first commit"),
        (account(("productive", None, 10, 50)), "effective 100.0 % of 10s"),
        (account(("starting", None, 10, 1)), "effective 0.0 % of 10s  lost: 100.0 % start-up"),
        (
            account(("productive", None, 3, 9), ("stalled", "new-word", 1, 2)),
            "effective 75.0 % of 4s  lost: 25.0 % new-word (2)",
        ),
        (account(("productive", None, 10, 50), ("stalled", "killed", 0, 2)), "effective 100.0 % of 10s"),
    ],
)
def test_lines(accounting: m.JobAccount, said: str) -> None:
    assert line(accounting).plain == said


def test_a_running_step_that_is_late_is_said(ftctl: Run, cluster: FakeCluster) -> None:
    late = m.TimeSpent(category="stalled", cause="hung", us=42 * SECOND, count=1)
    give(cluster, account(("productive", None, 10, 50), late=late))
    assert "the running step is longer than a calm one by 42s: replica hung" in ftctl("status").out


def test_the_table_adds_up_to_the_whole(ftctl: Run, cluster: FakeCluster) -> None:
    give(cluster, STORMY)
    out = ftctl("status", "--accounting").out
    assert "1.1 % killed (3)" in out
    assert "NODE" not in out
    rows = {found[1]: float(found[2]) for found in re.finditer(r"^(\S.*?) {2,}\S+ +([\d.]+) % +[-\d]", out, re.M)}
    assert rows["stalled: replica killed"] == 1.1
    assert rows["degraded: drain"] == 0.3
    assert rows["slow steps"] == 0.1
    assert rows.pop("all") == 100.0
    assert round(sum(rows.values()), 6) == 100.0
    assert len(rows) == len(STORMY.spent)
    assert all(len(text) <= 80 for text in out.splitlines())
    assert "\x1b" not in out
    assert "stalled: replica killed" in ftctl("status", "-o", "wide").out


def test_the_document_adds_up_to_the_microsecond(ftctl: Run, cluster: FakeCluster) -> None:
    give(cluster, STORMY)
    whole = ftctl("status", "-o", "json").json()["job"]["accounting"]
    assert whole == ftctl("status", "--accounting", "-o", "json").json()["accounting"]
    assert sum(entry["us"] for entry in whole["spent"]) == whole["total_us"] == 8000 * SECOND
    assert whole["effective"] == 0.972
    assert {"category": "degraded", "cause": "drained", "us": 22 * SECOND, "count": 400, "share": 0.00275} in whole[
        "spent"
    ]


def test_where_nobody_says_it(ftctl: Run, cluster: FakeCluster) -> None:
    give(cluster, None)
    assert "effective" not in ftctl("status").out
    assert "is not known" in ftctl("status", "--accounting").out
    assert ftctl("status", "--accounting", "-o", "json").json()["accounting"] is None
    cluster.job = None
    assert "is not known" in ftctl("status", "--accounting").out
    assert ftctl("status", "-o", "json").json()["job"]["accounting"] is None
    refused = ftctl("status", "--accounting", "--problems")
    assert (refused.code, "--problems" in refused.err) == (2, True)


@given(st.lists(st.integers(0, 10**15), max_size=30))
def test_what_is_shown_adds_up_however_it_is_rounded(parts: list[int]) -> None:
    shares = permille(parts)
    assert sum(shares) == (1000 if sum(parts) else 0)
    assert all(abs(share - part * 1000 / sum(parts)) < 1 for share, part in zip(shares, parts, strict=True) if part)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["productive", "starting", "stalled", "degraded", "recomputed", "slow"]),
            st.sampled_from([None, "killed", "min-replicas", "rejoin", "a-cause-of-a-newer-coordinator"]),
            st.floats(0, 1e7),
            st.integers(0, 10**9),
        ),
        max_size=20,
    )
)
def test_any_line_fits(spent: list[tuple[Any, ...]]) -> None:
    said = line(account(*spent)).plain
    assert len(said) <= 80
    shown = [float(number) for number in re.findall(r"([\d.]+) %", said)]
    assert not shown or round(sum(shown), 6) == 100.0
