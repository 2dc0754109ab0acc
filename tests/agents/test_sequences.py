"""Whatever happens in whatever order, no fault is left over and nothing of anybody else's is touched.

By default 500 sequences; SEQUENCES=N gives another number, of other sequences each time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sequences import NEVER, WISHES, Host, Processes, wish

WANTED = os.environ.get("SEQUENCES", "")

kinds = st.sampled_from(sorted(WISHES))
numbers = st.integers(0, 7)
moments = st.one_of(st.just(NEVER), st.integers(0, 24))  # the touch of host or disk at which the process dies
durations = st.sampled_from([0.5, 1.0, 5.0, 60.0, 600.0])
silences = st.sampled_from([None, None, 1.0, 8.0])


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    found = Processes()
    yield found
    found.close()


def test_random_sequences_leave_nothing_behind(processes: Processes) -> None:
    class Sequences(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            processes.supervise()
            self.host = Host(processes)

        @rule(kind=kinds, number=numbers, duration_s=durations, dead_man_s=silences)
        def inject(self, kind: str, number: int, duration_s: float, dead_man_s: float | None) -> None:
            self.host.inject(wish(kind, number, duration_s, dead_man_s))

        @rule(kind=kinds, number=numbers, duration_s=durations, dies_after=moments)
        def inject_and_die(self, kind: str, number: int, duration_s: float, dies_after: int) -> None:
            self.host.inject(wish(kind, number, duration_s, None), dies_after)

        @rule(which=numbers, dies_after=moments)
        def revert(self, which: int, dies_after: int) -> None:
            self.host.revert(which, dies_after)

        @rule(which=numbers)
        def keep_alive(self, which: int) -> None:
            self.host.keep_alive(which)

        @rule(seconds=st.sampled_from([0.1, 0.7, 1.0, 2.5, 30.0, 700.0]), dies_after=moments)
        def pass_time(self, seconds: float, dies_after: int) -> None:
            self.host.pass_time(seconds, dies_after)

        @rule()
        def kill_agent(self) -> None:
            self.host.kill_agent()

        @rule()
        def end_agent(self) -> None:
            self.host.end_agent()

        @rule(dies_after=moments)
        def start_agent(self, dies_after: int) -> None:
            self.host.start_agent(dies_after)

        @rule(which=numbers)
        def kill_dog(self, which: int) -> None:
            self.host.kill_dog(which)

        @rule()
        def reboot(self) -> None:
            self.host.reboot()

        @rule(what=st.sampled_from(["table", "route", "address", "queue", "up"]), number=numbers)
        def administrator(self, what: str, number: int) -> None:
            self.host.administrator(what, number)

        @rule(how=st.sampled_from(["time", "end", "anew"]))
        def finish(self, how: str) -> None:
            self.host.finish(how)
            self.host.start_agent()

        @invariant()
        def holds(self) -> None:
            self.host.check()

        def teardown(self) -> None:
            try:
                self.host.finish("anew")
            finally:
                self.host.close()

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Sequences,
        settings=settings(
            max_examples=int(WANTED or 500),
            stateful_step_count=14,
            derandomize=not WANTED,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
