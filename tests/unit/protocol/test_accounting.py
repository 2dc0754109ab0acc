"""Where the time went: known answers from hand-made streams of commits, and whatever happens, the whole is the sum."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftar_core.protocol.accounting import Accounting, Calm, Saved
from ftar_core.wire.accounting import Category, Loss

STEP = 0.2
HOLD = (Category.STALLED, Loss.MIN_REPLICAS)


class Book:
    """A job of four replicas that began at 100 s and made its first step by 103 s."""

    def __init__(
        self, saved: Saved | None = None, gap_s: float = 0.0, *, now: float = 100.0, fresh: bool = False
    ) -> None:
        self.now, self.step = now, saved.step if saved is not None else 0
        self.book = Accounting(now, 4, saved, gap_s, fresh=fresh)

    def starts(self, after: float = 3.0, step: int = 1) -> Book:
        self.now += after - STEP
        self.book.begins(step, self.now)
        self.book.stand(None, self.now)
        self.step = step - 1
        return self.steps(1)

    def steps(self, count: int, length: float = STEP, contributors: int = 4, **more: object) -> Book:
        for _ in range(count):
            self.now += length
            self.step += 1
            self.book.committed(self.step, contributors, self.now, **more)  # type: ignore[arg-type]
        return self

    def spent(self) -> dict[str, float]:
        """`stalled killed` -> seconds."""
        view = self.book.view(self.now, 0.0)
        assert view.total_us + self.book.uncounted_us() == self.book.elapsed_us()
        return {
            f"{s.category.value} {s.cause.value if s.cause else ''}".strip(): pytest.approx(s.us / 1e6, abs=2e-5)
            for s in view.spent
            if s.us
        }

    def count(self, category: Category, cause: Loss | None = None) -> int:
        found = [s.count for s in self.book.view(self.now, 0.0).spent if (s.category, s.cause) == (category, cause)]
        return found[0] if found else 0


def test_calm_steps_are_productive_and_what_was_before_the_first_commit_was_the_start() -> None:
    job = Book().starts(3.0).steps(10)
    assert job.spent() == {"starting": 3.0, "productive": 2.0}
    assert job.book.view(job.now, 0.0).effective == pytest.approx(0.4)
    assert job.count(Category.PRODUCTIVE) == 10


def test_a_killed_replica_costs_the_wait_the_second_reduction_and_a_quarter_of_each_step_without_it() -> None:
    job = Book().starts().steps(10)
    job.book.lost("r3", Loss.KILLED, job.now + 0.25)
    job.book.again(job.now + 0.25)  # 50 ms late already, and 30 ms to reduce it again
    job.steps(1, 0.28, contributors=3).steps(4, contributors=3)
    assert job.spent() == {
        "starting": 3.0,
        "productive": 2.0 + 5 * STEP * 0.75,
        "stalled killed": 0.05,
        "recomputed killed": 0.03,
        "degraded killed": 5 * STEP * 0.25,
    }
    job.book.joined("r3")
    job.steps(1, 0.23).steps(5)
    assert job.spent()["stalled rejoin"] == 0.03
    assert job.spent()["degraded killed"] == 5 * STEP * 0.25
    assert (job.count(Category.STALLED, Loss.KILLED), job.count(Category.STALLED, Loss.REJOIN)) == (1, 1)
    assert job.count(Category.DEGRADED, Loss.KILLED) == 5


def test_a_kill_that_costs_nothing_is_counted_and_takes_no_time() -> None:
    job = Book().starts().steps(10)
    job.book.lost("r3", Loss.KILLED, job.now + 0.1)
    job.book.again(job.now + 0.1)
    job.book.joined("r4")  # a spare
    job.steps(1, 0.203)
    assert job.spent() == {"starting": 3.0, "productive": 2.203}
    assert job.count(Category.STALLED, Loss.KILLED) == 1


def test_the_missing_are_counted_by_what_took_them_out() -> None:
    job = Book().starts().steps(5)
    job.book.lost("r1", Loss.DRAINED, job.now)
    job.steps(2, contributors=3)
    job.book.lost("r2", Loss.SILENT, job.now)
    job.steps(2, contributors=2)
    spent = job.spent()
    assert spent["degraded drained"] == 4 * STEP / 4
    assert spent["degraded silent"] == 2 * STEP / 4
    assert spent["productive"] == 5 * STEP + 2 * STEP * 0.75 + 2 * STEP * 0.5


def test_a_job_that_started_without_all_is_degraded_by_the_absent() -> None:
    job = Book().starts()
    job.steps(4, contributors=3)
    assert job.spent() == {"starting": 3.0, "productive": 0.6, "degraded absent": 0.2}


def test_a_long_step_is_lost_to_the_first_cause_that_was_seen_and_a_slow_one_is_not_hidden() -> None:
    job = Book().starts().steps(10)
    job.book.see(Loss.CHECKPOINT)
    job.book.see(Loss.COMPILE)
    job.steps(1, 1.0)
    job.book.see(Loss.LINK)
    job.steps(1, 0.3).steps(1, 0.5).steps(1, 0.204)
    assert job.spent() == {
        "starting": 3.0,
        "productive": 2.0 + 3 * STEP + 0.204,
        "stalled checkpoint": 0.8,
        "stalled link": 0.1,
        "slow": 0.3,
    }
    assert job.count(Category.STALLED, Loss.CHECKPOINT) == 1
    assert job.count(Category.SLOW) == 1


def test_steps_that_vary_anyway_are_not_called_slow() -> None:
    job = Book().starts()
    for number in range(40):
        job.steps(1, STEP + (number % 5 - 2) * 0.02)
    assert "slow" not in job.spent()


def test_a_straggler_takes_its_lead_from_every_step() -> None:
    job = Book().starts().steps(10)
    job.steps(20, 0.25, lead_ms=50.0)
    spent = job.spent()
    assert spent["stalled straggler"] == 20 * 0.05
    assert spent["productive"] == 30 * STEP
    assert job.count(Category.STALLED, Loss.STRAGGLER) == 20


def test_a_job_below_min_replicas_is_held_for_as_long_as_it_holds() -> None:
    job = Book().starts().steps(5)
    job.now += 0.1
    job.book.lost("r1", Loss.KILLED, job.now)
    job.book.stand(HOLD, job.now)
    job.now += 9.0
    assert job.spent()["stalled min-replicas"] == 9.0  # it shows before it is over
    job.book.joined("r1")
    job.book.stand(None, job.now)
    job.steps(1, 0.1)
    assert job.spent() == {"starting": 3.0, "productive": 1.2, "stalled min-replicas": 9.0}


def test_a_skipped_step_was_for_nothing() -> None:
    job = Book().starts().steps(5).steps(1, skipped=True)
    assert job.spent()["stalled non-finite"] == STEP
    assert job.spent()["productive"] == 5 * STEP


def test_a_running_step_shows_when_it_is_late() -> None:
    job = Book().starts().steps(10)
    assert job.book.view(job.now + 0.2, 0.0).late is None
    job.book.see(Loss.HUNG)
    late = job.book.view(job.now + 5.2, 0.0).late
    assert late is not None
    assert (late.category, late.cause, late.us) == (Category.STALLED, Loss.HUNG, 5_000_000)
    job.now += 5.2
    job.book.lost("r0", Loss.HUNG, job.now)
    job.steps(1, 0.0)
    assert job.spent()["stalled hung"] == 5.0


def test_a_restarted_coordinator_knows_how_many_steps_the_time_since_the_last_word_was_good_for() -> None:
    job = Book().starts().steps(10)
    saved = job.book.saved(job.now, 5000.0)
    # Twelve steps later it was killed; the members waited 4 s for the next one, which recovered for 0.6 s.
    again = Book(saved, 12 * STEP + 4.0, now=9.0)
    again.now += 0.6
    assert again.spent() == {"starting": 3.0, "productive": 2.0, "stalled coordinator": 0.6}
    again.book.begins(24, again.now)  # one first step, ten, twelve
    again.book.stand(None, again.now)
    again.step = 23
    again.steps(3)
    assert again.spent() == {"starting": 3.0, "productive": 25 * STEP, "stalled coordinator": 4.6}
    assert again.count(Category.STALLED, Loss.COORDINATOR) == 1
    assert again.book.saved(again.now, 5007.0).since == saved.since == pytest.approx(4995.0)


def test_steps_since_a_checkpoint_are_made_again() -> None:
    job = Book().starts().steps(20)
    job.book.stand((Category.STALLED, Loss.VANISHED), job.now)
    job.now += 2.0
    saved = job.book.saved(job.now, 5000.0)
    again = Book(saved, 10.0, now=1.0, fresh=True).starts(3.0, step=15)
    again.steps(6).steps(4)  # to 21, where it had been; 22 to 25
    assert again.spent() == {
        "starting": 6.0,
        "productive": 24 * STEP,
        "stalled vanished": 2.0,
        "stalled coordinator": 10.0,
        "recomputed restart": 6 * STEP,
    }


def test_a_job_that_begins_at_its_first_step_is_another_one() -> None:
    saved = Book().starts().steps(20).book.saved(107.0, 5000.0)
    assert Book(saved, 10.0, now=1.0, fresh=True).starts(3.0).steps(5).spent() == {"starting": 3.0, "productive": 1.0}


def test_a_commit_that_could_not_be_written_is_worked_for_once() -> None:
    job = Book().starts().steps(5)
    kept = job.book.arrivals()
    job.steps(1)
    job.book.lost("r1", Loss.DRAINED, job.now)
    job.book.undone(job.step, kept)
    job.step -= 1
    job.steps(1, 2.0)
    assert job.spent() == {"starting": 3.0, "productive": 6 * STEP, "stalled record": 2.0}
    assert job.count(Category.STALLED, Loss.DRAINED) == 0
    assert job.count(Category.PRODUCTIVE) == 6


def test_the_end_of_the_job_is_the_end_of_its_time() -> None:
    job = Book().starts().steps(5)
    job.book.end(job.now)
    job.now += 1000
    assert job.spent() == {"starting": 3.0, "productive": 1.0}
    assert Accounting(0.0, 4, job.book.saved(job.now, 0.0), 500.0).uncounted_us() == 0


def test_the_median_and_noise_of_a_window() -> None:
    calm = Calm()
    assert (calm.median(), calm.noise()) == (None, 0)
    for us in [10_000_000, *range(200_000, 232_000, 1_000)]:
        calm.add(us)
    assert calm.median() == 215_000  # the first is out of the window
    assert calm.noise() == 8 * 4 * 1000 - 4 * 1000 + 4 * 1000
    assert Calm(calm.steps()).steps() == calm.steps()


def test_what_a_long_job_keeps_does_not_grow() -> None:
    job = Book().starts().steps(50)
    for number in range(300):
        job.book.lost(f"r{number}", Loss.KILLED, job.now)
        job.book.joined(f"s{number}")
    job.book._absent.clear()
    size = len(repr(vars(job.book)))
    job.steps(50_000)
    assert len(repr(vars(job.book))) < size + 200


# --- whatever happens ----------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["r0", "r1", "r2", "r3", "r4"])
CAUSES = st.sampled_from(list(Loss))
STANDS = st.sampled_from([None, None, HOLD, (Category.STALLED, Loss.VANISHED), (Category.STARTING, None)])
DOINGS = st.one_of(
    st.tuples(st.just("commit"), st.integers(1, 6), st.booleans(), st.sampled_from([0.0, 0.0, 30.0, 1e9])),
    st.tuples(st.just("lost"), NAMES, CAUSES),
    st.tuples(st.just("joined"), NAMES),
    st.tuples(st.just("see"), CAUSES),
    st.tuples(st.just("again")),
    st.tuples(st.just("stand"), STANDS),
    st.tuples(st.just("begins"), st.integers(-3, 40)),
    st.tuples(st.just("undone")),
    st.tuples(st.just("restart"), st.floats(-5.0, 1e6), st.booleans()),
    st.tuples(st.just("end")),
)
MOMENTS = st.one_of(st.floats(0.0, 0.5), st.floats(-1e5, 1e5))  # a clock that jumps both ways


@settings(max_examples=150)
@given(st.lists(st.tuples(MOMENTS, DOINGS), max_size=60), st.floats(0.0, 1e9))
def test_the_sum_is_the_whole_and_nothing_is_negative_whatever_happens(
    doings: list[tuple[float, tuple[object, ...]]], start: float
) -> None:
    now, step, book = start, 0, Accounting(start, 4)
    kept = book.arrivals()
    shown: dict[object, int] = {}
    for passed, (what, *args) in doings:
        now += passed
        if what == "commit":
            step += 1
            contributors, skipped, lead_ms = args
            book.committed(step, contributors, now, skipped=skipped, lead_ms=lead_ms)  # type: ignore[arg-type]
        elif what == "begins":
            step = max(1, step + args[0]) - 1  # type: ignore[operator]
            book.begins(step + 1, now)
        elif what == "undone":
            book.undone(step, kept)
        elif what == "restart":
            gap_s, fresh = args
            book = Accounting(now, 4, book.saved(now, 0.0), gap_s, fresh=fresh)  # type: ignore[arg-type]
            shown = {} if fresh else shown
        elif what in ("joined", "see"):
            getattr(book, str(what))(*args)
        else:
            getattr(book, str(what))(*args, now)
        view = book.view(now, now)
        assert view.total_us == sum(entry.us for entry in view.spent)
        assert view.total_us + book.uncounted_us() == book.elapsed_us()
        assert book.uncounted_us() >= 0
        times = {(entry.category, entry.cause): entry.us for entry in view.spent}
        assert all(us >= shown.get(key, 0) for key, us in times.items()), "a sum became smaller"
        assert set(shown) <= set(times)
        assert all(entry.us >= 0 and entry.count >= 0 for entry in view.spent)
        shown = {key: us for key, us in times.items() if us}
