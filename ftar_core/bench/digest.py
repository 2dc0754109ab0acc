"""`python -m ftar_core.bench digest`: what the comparison of replicas' results costs of a step, at 100 MB of gradients.

One process and one thread, no network: a step (forward, backward, AdamW) of the example's model in that size, and after
each one what the check reads. All times are CPU time of the thread, medians of the rounds. check: the digest of all
gradients together with the look for infinity; finite: that look alone, which every step needs anyway; slice: the digest
of a 64th of parameters and optimizer state; share: (check - finite + slice) / step, goal 1 %. Part of it is hidden in a
job, where buckets are read while others are still on their way. norm: the sum of squares of the own gradients.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from ftar_core.bench.models import SHAPES, checked
from ftar_core.bench.report import Column, Help, Report, UsageError, at_most, ended, number, percentile

ROTATION = 64
COLUMNS = [
    Column("model", "model", 9),
    Column("gradient_bytes", "gradients", 11, lambda v: f"{float(v or 0) / 1e6:.0f} MB"),
    Column("step_ms", "step", 11, number(".1f", " ms")),
    Column("check_ms", "check", 10, number(".2f", " ms")),
    Column("finite_ms", "finite", 10, number(".2f", " ms")),
    Column("slice_ms", "slice", 10, number(".2f", " ms")),
    Column("share", "share", 9, number(".4f"), at_most(0.01)),
    Column("norm_ms", "norm", 10, number(".2f", " ms")),
]


def measure(name: str, batch: int, rounds: int, tell: Callable[[int], None]) -> dict[str, Any]:
    import torch

    from ftar_core.native import core
    from ftar_core.training.digests import StepCheck
    from ftar_core.training.example_model import BYTES, ByteGPT, Shape
    from ftar_core.training.gradients import GradientTaker, Mode
    from ftar_core.training.plan import DTYPE_CODES, make_plan
    from ftar_core.training.update import Update

    torch.set_num_threads(1)
    torch.manual_seed(1)
    shape = Shape(**SHAPES[name])
    model = ByteGPT(shape)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = make_plan(model)
    taker = GradientTaker(model, plan, lambda bucket: None)
    nothing: dict[str, Any] = dict.fromkeys(("schedulers", "scaler", "update", "skipped", "max_norm", "lr_scale"))
    check = StepCheck(plan, taker, Update(models=model, optimizers=optimizer, replicas=0, **nothing), ROTATION)
    tokens = torch.randint(0, BYTES, (batch, shape.context + 1))
    buckets = [(taker.reduced[b.index].data_ptr(), b.count, DTYPE_CODES[b.dtype]) for b in plan.buckets]
    times: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[[], object]) -> None:
        began = time.thread_time()
        work()
        times.setdefault(what, []).append((time.thread_time() - began) * 1000)

    def train() -> None:
        taker.begin(Mode.OFF)
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    train()  # the optimizer's state is made
    epoch: Any = object()
    for number_ in range(rounds):
        timed("step", train)
        timed("finite", lambda: [core.all_finite(*bucket) for bucket in buckets])
        check.read_again()
        timed("check", lambda: check.look(epoch, range(len(plan.all_buckets))))
        timed("slice", lambda step=number_: check.begin(step))  # type: ignore[misc]
        timed("norm", lambda: [core.squares(*bucket) for bucket in buckets])
        tell(number_ + 1)
    median = {what: percentile(values, 0.5) for what, values in times.items()}
    share = (max(0.0, median["check"] - median["finite"]) + median["slice"]) / median["step"]
    found = {f"{what}_ms": round(value, 3) for what, value in median.items()}
    return {"model": name, "gradient_bytes": plan.nbytes, "rounds": rounds, "share": round(share, 5), **found}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ftar_core.bench digest", description=__doc__, formatter_class=Help)
    parser.add_argument("--models", default="101MB", help=f"the example's model, in these sizes: {', '.join(SHAPES)}")
    parser.add_argument("--batch", type=int, default=8, help="samples of a step, 64 bytes each")
    parser.add_argument("--rounds", type=int, default=21, help="how often")
    parser.add_argument("--quick", action="store_true", help="the example's own size, 5 rounds")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="how to print")
    options: Any = parser.parse_args(argv)
    if options.quick:
        options.models, options.rounds = "example", 5
    return checked(options, "batch", "rounds")


def run(argv: Sequence[str]) -> int:
    options = parse(argv)
    if find_spec("torch") is None:
        raise UsageError("torch is not installed", hint="pip install 'ftctl[train]'")
    with Report("digest", COLUMNS, options.output) as report:
        for k, name in enumerate(options.models):

            def tell(round_: int, k: int = k, name: str = name) -> None:
                report.step(f"{name}, round {round_}", (k + round_ / options.rounds) / len(options.models))

            report.add(measure(name, options.batch, options.rounds, tell))
    return 0


def main(argv: Sequence[str]) -> int:
    return ended(lambda: run(argv))
