"""Replicas that do not fit are refused with what is different, and nobody waits long for the answer."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import msgspec
import pytest

from ftar_core.errors import WireError
from ftar_core.protocol.events import ConnectionClosed, MemberMessage, Tick
from ftar_core.protocol.likeness import AT_ONCE, WAIT_S
from ftar_core.wire.messages import Describe, Outline, Refused, Welcome
from ftar_core.wire.outline import MAX_BYTES, Parameter, difference, pack, unpack

from .test_operator import Desk


def parameter(name: str, shape: tuple[int, ...] = (4,), dtype: str = "float32", placement: str = "") -> Parameter:
    return Parameter(name, dtype, shape, shape, placement, 0)


MODEL = [parameter("head.bias", (7,)), parameter("head.weight", (7, 4)), parameter("body.weight", (4, 4))]


@dataclass
class Case:
    change: list[Parameter]
    says: str


CASES = [
    Case(
        [MODEL[0], parameter("head.weight", (9, 4)), MODEL[2]], "parameter head.weight has shape (9, 4), on r0 (7, 4)"
    ),
    Case([MODEL[0], parameter("head.weight", (7, 4), "bfloat16"), MODEL[2]], "head.weight is bfloat16, on r0 float32"),
    Case([MODEL[0], parameter("tail.weight"), *MODEL[1:]], "parameter tail.weight (4,) is not on r0"),
    Case([MODEL[0], MODEL[2]], "parameter head.weight (7, 4) of r0 is missing"),
    Case([*MODEL, parameter("more")], "parameter more (4,) is not on r0"),
    Case(MODEL[:2], "parameter body.weight (4, 4) of r0 is missing"),
    Case([MODEL[1], MODEL[0], MODEL[2]], "head.weight comes where r0 has head.bias: the order is different"),
    Case(
        [*MODEL[:2], parameter("body.weight", (4, 4), placement="S(0)/2")], "body.weight is sharded otherwise (S(0)/2,"
    ),
    Case([*MODEL[:2], msgspec.structs.replace(MODEL[2], bucket=1)], "bucket 1, on r0 in bucket 0: bucket_bytes"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.says[:30])
def test_the_first_difference_is_named(case: Case) -> None:
    assert case.says in difference(unpack(pack(case.change)), unpack(pack(MODEL)), "r0")


def test_equal_models_have_no_difference() -> None:
    assert difference(MODEL, list(MODEL), "r0") == ""


def test_a_very_long_list_is_cut_short_and_what_is_no_outline_is_refused() -> None:
    many = [parameter(f"{zlib.crc32(str(i).encode()):x}.{i * i}", (i, i + 1)) for i in range(60_000)]
    packed = pack(many)
    assert len(packed) <= MAX_BYTES
    assert unpack(packed) == tuple(many[: len(unpack(packed))])
    bomb = zlib.compress(b"\0" * (64 << 20))
    assert len(bomb) < MAX_BYTES
    for bad in (b"", b"x" * 100, packed[:-5], bomb, b"x" * (MAX_BYTES + 1), zlib.compress(b"\x91\x91\x01")):
        with pytest.raises(WireError):
            unpack(bad)


def running() -> Desk:
    desk = Desk(min_replicas=1)
    desk.done(0, 1, 2)
    desk.feed(ConnectionClosed(1, "reset"))
    return desk


def outline(parameters: list[Parameter], *plans: str) -> Outline:
    return Outline(plans=plans or ("x",), parameters=pack(parameters))


def test_another_model_is_refused_with_the_first_difference_once_both_have_told_theirs() -> None:
    desk = running()
    desk.hello(7, "r1", plan="other")
    assert set(desk.sent(Describe)) == {0, 7}
    assert set(desk.sent(Welcome)) == {7}
    desk.feed(MemberMessage(0, outline(MODEL, "p")))
    assert not desk.sent(Refused)
    desk.feed(MemberMessage(7, outline(MODEL[:2], "other")))
    refused = desk.sent(Refused)[7]
    assert isinstance(refused, Refused)
    assert refused.reason == "the model of r1 is not the job's: parameter body.weight (4, 4) of r0 is missing"
    assert "the same script" in refused.hint
    assert not refused.retry
    known = desk.machine.job.table.replicas["r1"]
    assert known.reason == f"{refused.reason} ({refused.hint})", "for `ftctl why replica r1`"
    assert not desk.machine.job.comparing
    assert desk.machine.job.contributors() == ["r0", "r2"]


def test_where_rank_0_is_the_same_the_ranks_that_differ_are_named() -> None:
    desk = running()
    desk.hello(7, "r1", plan="other")
    desk.feed(MemberMessage(7, outline(MODEL, "a", "c", "d")))
    desk.feed(MemberMessage(0, outline(MODEL, "a", "b", "d")))
    refused = desk.sent(Refused)[7]
    assert isinstance(refused, Refused)
    assert "the parts of rank 1 have other shapes than on r0" in refused.reason


@pytest.mark.parametrize("answer", [None, Outline(plans=("p",), parameters=b"nonsense")])
def test_without_a_sensible_answer_it_is_refused_all_the_same(answer: Outline | None) -> None:
    desk = running()
    desk.hello(7, "r1", plan="other")
    desk.feed(MemberMessage(7, outline(MODEL)))
    if answer is not None:
        desk.feed(MemberMessage(0, answer))
    else:
        desk.now += WAIT_S
        desk.feed(Tick())
    refused = desk.sent(Refused)[7]
    assert isinstance(refused, Refused)
    assert "its gradients have other names, shapes or types" in refused.reason


def test_a_newcomer_that_hangs_up_is_forgotten_and_a_flood_of_them_is_refused_at_once() -> None:
    desk = running()
    desk.hello(7, "r1", plan="other")
    desk.feed(ConnectionClosed(7, "reset"))
    assert not desk.machine.job.comparing
    for i in range(AT_ONCE + 1):
        desk.hello(20 + i, f"x{i}", plan="other")
    assert set(desk.sent(Refused)) == {20 + AT_ONCE}


def test_other_versions_are_refused_by_name() -> None:
    desk = running()
    desk.hello(7, "r1", software={"ftctl": "1", "torch": "2.12.0"})
    refused = desk.sent(Refused)[7]
    assert isinstance(refused, Refused)
    assert refused.reason == "r1 runs torch 2.12.0, the job's replicas run 2.13.0: their results would differ"
    assert refused.hint == "install torch 2.13.0 there"
    desk.hello(8, "r1", software={"ftctl": "2", "torch": "2.13.0"})
    refused = desk.sent(Refused)[8]
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("r1 runs ftctl 2, the job's replicas run 1")


def test_at_the_start_of_a_job_the_odd_one_is_told_the_difference_and_the_others_go_on() -> None:
    desk = Desk(min_replicas=1, plans="ppo")
    assert desk.machine.job.contributors() == ["r0", "r1"]
    desk.feed(MemberMessage(0, outline(MODEL, "p")))
    desk.feed(MemberMessage(2, outline(MODEL[1:], "o")))
    refused = desk.sent(Refused)[2]
    assert isinstance(refused, Refused)
    assert "parameter head.bias (7,) of r0 is missing" in refused.reason
    assert desk.state("r2") == "evicted"
    desk.done(0, 1)
    assert desk.machine.job.step == 2
