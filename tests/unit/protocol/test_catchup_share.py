"""The job's limit on catch-up traffic is shared by those who catch up, anew whenever one comes or is done."""

from __future__ import annotations

import pytest

from ftar_core.protocol.config import JobConfig
from ftar_core.protocol.effects import CoordinatorEffect, Send
from ftar_core.protocol.events import MemberMessage
from ftar_core.wire.messages import Catchup, CaughtUp

from .test_operator import Desk


def shares(effects: list[CoordinatorEffect]) -> dict[int, float]:
    """Connection -> the share it was told last."""
    return {e.conn: e.message.mbit for e in effects if isinstance(e, Send) and isinstance(e.message, Catchup)}


def test_shadows_share_what_the_job_allows() -> None:
    desk = Desk(catchup_mbit=900)
    assert shares(desk.hello(3, "r3")) == {3: 900}
    assert shares(desk.hello(4, "r4")) == {3: 450, 4: 450}
    assert shares(desk.hello(5, "r5")) == {3: 300, 4: 300, 5: 300}
    assert shares(desk.feed(MemberMessage(4, CaughtUp(step=0)))) == {3: 450, 5: 450}
    assert shares(desk.feed(MemberMessage(4, CaughtUp(step=0)))) == {}, "it is a spare already"


def test_without_a_limit_nobody_is_told_anew() -> None:
    desk = Desk()
    assert shares(desk.hello(3, "r3")) == {3: 0}
    assert shares(desk.hello(4, "r4")) == {4: 0}


def test_a_limit_below_none_is_refused() -> None:
    with pytest.raises(ValueError, match="catchup_mbit"):
        JobConfig(job="j", replicas=1, catchup_mbit=-1)
