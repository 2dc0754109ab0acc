"""Slices of the state: every byte once in a rotation, whatever the sizes; and what a step says about its results."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from ftar_core.training.digests import StepCheck
from ftar_core.training.gradients import GradientTaker
from ftar_core.training.plan import make_plan
from ftar_core.training.rotation import Rotation
from ftar_core.training.update import Update
from ftar_core.wire.ids import EpochId, Term

EPOCH = EpochId(Term(1, "c"), 1)


@pytest.mark.parametrize("seed", range(20))
def test_a_rotation_covers_every_byte_of_every_tensor_once(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 4, 12, 1000, 40_000]) for _ in range(rng.randrange(1, 12))]
    steps = rng.choice([1, 2, 7, 64])
    rotation = Rotation(sizes, steps)
    kept = [rng.choice([size, 4, 2 * size, 0]) for size in sizes]  # what an optimizer has for it
    first = rng.randrange(1000)
    for nbytes in (sizes, kept):
        seen = [[0] * n for n in nbytes]
        for step in range(first, first + steps):
            for piece in rotation.at(step):
                begin, end = piece.cut(nbytes[piece.index])
                for at in range(begin, end):
                    seen[piece.index][at] += 1
        assert all(set(counts) <= {1} for size, counts in zip(sizes, seen, strict=True) if size)
    slices = [sum(p.last - p.first for p in rotation.at(step)) for step in range(steps)]
    assert max(slices) - min(slices) <= 1
    assert rotation.at(first) == rotation.at(first + steps)


def made(rotation: int) -> tuple[StepCheck, GradientTaker, Update]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 7))
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    plan = make_plan(model, bucket_bytes=2000)
    taker = GradientTaker(model, plan, lambda bucket: None)
    model(torch.randn(3, 30)).square().sum().backward()
    optimizer.step()
    taker.reduced[-1][0] = 1.0
    nothing = dict.fromkeys(("schedulers", "scaler", "update", "skipped", "max_norm", "lr_scale"), None)
    update = Update(models=model, optimizers=optimizer, replicas=0, **nothing)  # type: ignore[arg-type]
    return StepCheck(plan, taker, update, rotation), taker, update


def test_a_hundred_flips_are_seen_and_calm_steps_are_equal() -> None:
    rng, rotation = random.Random(4), 8
    (mine, taker, update), (theirs, _, _) = made(rotation), made(rotation)

    def told(check: StepCheck, step: int) -> tuple[int, int, bool]:
        check.begin(step)
        return check.result(EPOCH)

    assert all(told(mine, step) == told(theirs, step) for step in range(1, 1000))
    targets = [("reduced", t) for t in taker.reduced[:-1]]
    for name, parameter in update.model.named_parameters():
        targets.append((f"parameter {name}", parameter.detach()))
        targets += [(f"optimizer state {key} of {name}", t) for key, t in update.state_of(parameter)]  # type: ignore[misc]
    for _ in range(100):
        name, tensor = rng.choice(targets)
        flat = tensor.reshape(-1).view(torch.uint8)
        at, bit = rng.randrange(flat.numel()), 1 << rng.randrange(8)
        flat[at] ^= bit
        first = rng.randrange(1, 1000)
        found = [step for step in range(first, first + rotation) if told(mine, step)[:2] != told(theirs, step)[:2]]
        assert len(found) == (rotation if name == "reduced" else 1), name
        told(mine, found[0]), told(theirs, found[0])
        named = [a for a, b in zip(mine.parts(found[0]), theirs.parts(found[0]), strict=True) if a != b]
        assert len(named) == 1
        assert named[0][0].startswith(name)
        flat[at] ^= bit


def test_what_was_read_before_the_epoch_changed_is_read_again() -> None:
    check, taker, _ = made(8)
    check.begin(5)
    check.look(EPOCH, [0, 1])
    before = check.result(EPOCH)
    taker.reduced[0][3] += 1
    assert check.result(EPOCH) == before  # it was read already
    assert check.result(EpochId(Term(1, "c"), 2)) != before
    taker.reduced[0][3] = float("inf")
    check.read_again()
    assert check.result(EPOCH)[2] is False
    assert check.parts(4) == ()
