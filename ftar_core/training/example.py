"""Trains a small byte-level GPT on the Python standard library's source, as one replica of a job.

What a training script has to do for `ftar_core` are the five lines marked below; everything else is an ordinary PyTorch
loop. By hand, in two terminals (a coordinator runs at 127.0.0.1:7600 and the token is in the file /tmp/token):

    export FTAR_COORDINATOR=127.0.0.1:7600 FTAR_JOB=demo FTAR_TOKEN_FILE=/tmp/token
    FTAR_REPLICA=r0 python -m ftar_core.training.example --steps 100        # terminal 1
    FTAR_REPLICA=r1 python -m ftar_core.training.example --steps 100        # terminal 2

Several processes a replica, which then share the model (FSDP2), one torchrun a replica:

    FTAR_REPLICA=r0 torchrun --nproc-per-node 2 -m ftar_core.training.example

Under Slurm, one task a replica:

    srun --ntasks=4 bash -c 'FTAR_REPLICA=r$SLURM_PROCID python -m ftar_core.training.example'
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import ftar_core  # 1
from ftar_core.errors import FtarError, NotAssembled
from ftar_core.training.example_model import ByteGPT, Shape, SourceText
from ftar_core.wire.exits import RankExit


def train(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)  # every replica begins with the same parameters
    shape = Shape(layers=options.layers, heads=options.heads, width=options.width, context=options.context)
    device = torch.device(options.device)
    text = SourceText(shape.context)
    model = ByteGPT(shape).to(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        shard(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    sampler = ftar_core.BatchSampler(text, options.batch_size, seed=options.seed, passes=options.passes)
    loader = DataLoader(text, batch_sampler=sampler, num_workers=options.workers)
    kept = ftar_core.Checkpoint(options.checkpoint, every=options.checkpoint_every) if options.checkpoint else None
    session = ftar_core.Session(model, optimizer, last_step=options.steps, checkpoint=kept)  # 2
    pace = Pace(options.step_ms / 1000.0)
    for parts in session.data(loader):  # 3, where the loader itself was
        step = session.current_step
        pace.begin()
        inputs, targets = (part.to(device) for part in parts)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        pace.before_backward()
        loss.backward()
        pace.after_backward()
        session.step(loss, tokens=targets.numel())  # 4, where optimizer.step() and zero_grad() were
        if session.current_step > step and step % options.print_every == 0:  # (a warm-up turn is not a step)
            say(session, step)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def shard(model: ByteGPT, device: torch.device) -> None:
    """Several ranks in this replica: each keeps a part of every parameter (FSDP2). Collectives stay inside."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # The logits are a view, which FSDP2 warns of; nobody changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Pace:
    """Makes forward and backward together take `step_s`, by sleeping: several replicas on two cores would otherwise
    measure the scheduler. It sleeps before backward, so that the step's last gradient still comes at its end, as it
    does where a step takes its time computing."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._backward_s = 0.0  # of the last step
        self._mark = 0.0

    def begin(self) -> None:
        self._mark = time.monotonic()

    def before_backward(self) -> None:
        left_s = self._mark + self._step_s - self._backward_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        self._mark = time.monotonic()

    def after_backward(self) -> None:
        self._backward_s = time.monotonic() - self._mark


def say(session: ftar_core.Session, step: int) -> None:
    loss = "-" if session.mean_loss is None else f"{session.mean_loss:.4f}"
    rate = "-" if session.tokens_per_s is None else f"{session.tokens_per_s:.0f}"
    print(f"step {step}  loss {loss}  tokens/s {rate}  contributors {' '.join(session.contributors)}", flush=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 is expected")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: at least 0 is expected")
    return value


def _interval(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < 86_400_000:
        raise argparse.ArgumentTypeError(f"{text}: a number of at least 0 is expected")
    return value


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m ftar_core.training.example",
        description="Train a small byte-level GPT on the Python standard library's source, as one replica of a job. "
        "The environment says which: FTAR_COORDINATOR, FTAR_JOB, FTAR_REPLICA and FTAR_TOKEN_FILE are needed.",
        epilog="All replicas of a job need the same options (--step-ms, --print-every, --workers, --device may vary).",
    )
    p.add_argument("--steps", type=int, default=0, metavar="N", help="end the job after step N (0: no end)")
    p.add_argument(
        "--step-ms",
        type=_not_negative,
        default=200.0,
        metavar="MS",
        help="least time of a step (0: as fast as it goes)",
    )
    p.add_argument("--seed", type=int, default=0, help="of the parameters and of the order of samples")
    p.add_argument(
        "--batch-size", type=_positive, default=2, help="samples a replica trains in a step (its ranks share them)"
    )
    p.add_argument("--passes", type=_count, default=0, metavar="N", help="end after N passes over the data (0: no end)")
    p.add_argument("--workers", type=_count, default=0, metavar="N", help="processes that read ahead")
    p.add_argument("--context", type=_positive, default=Shape.context, metavar="BYTES", help="length of a sample")
    p.add_argument("--layers", type=_positive, default=Shape.layers)
    p.add_argument("--heads", type=_positive, default=Shape.heads)
    p.add_argument("--width", type=_positive, default=Shape.width, help="of the residual stream")
    p.add_argument("--learning-rate", type=_not_negative, default=1e-3)
    p.add_argument("--device", default="cpu", help="cpu, or cuda:N")
    p.add_argument(
        "--checkpoint", default="", metavar="DIR", help="keep checkpoints there, and go on from the newest if all died"
    )
    p.add_argument(
        "--checkpoint-every",
        type=_interval,
        default=100,
        metavar="N",
        help="so many steps from one checkpoint to the next, or a time such as 10min",
    )
    p.add_argument("--print-every", type=_positive, default=10, metavar="N", help="print every Nth step")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code as in ftar_core.wire.exits; 130 after Ctrl-C. Starts no thread before the session does, so that it may
    be called in a process that was forked from one with torch imported."""
    options = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    if options.steps < 0 or options.width % options.heads != 0:
        problem = "--steps must be at least 0" if options.steps < 0 else "--width must be a multiple of --heads"
        print(f"error: {problem}", file=sys.stderr)
        return RankExit.USAGE
    try:
        train(options)
    except NotAssembled as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return RankExit.RESTART
    except FtarError as error:
        print(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return RankExit.USAGE
    except KeyboardInterrupt:
        print("interrupted: this replica leaves the job", file=sys.stderr)
        return 130
    return RankExit.FINISHED


if __name__ == "__main__":
    sys.exit(main())
