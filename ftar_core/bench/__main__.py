"""`python -m ftar_core.bench NAME`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

BENCHES = {
    "allreduce": "all-reduce over this project's ring, against gloo and against a bare TCP ring",
    "p2p": "messages through the NCCL plugin, against a bare socket and against the plugin unprotected",
    "failover": "rails fail under the plugin's traffic: how soon it is noticed, how long traffic stands still",
    "catchup": "the state reaches a replica that comes back, against a bare TCP copy",
    "stripe": "what several rails carry together",
    "recovery": "replicas die, freeze and get lost: stall and effective training time, against torchft and a restart",
    "overhead": "a training step in a session, against DDP over gloo: time and memory, when nothing fails",
    "checkpoint": "what the steps beside a checkpoint take, against those of rounds without one",
    "digest": "what the comparison of replicas' results costs of a step",
    "commit": "how soon a step is committed everywhere, in jobs of thousands of simulated ranks",
    "parity": "what a storm of failures does to the loss of a model, on the same tokens",
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m ftar_core.bench NAME [options]   (NAME --help tells them)\n")
        print("\n".join(f"  {name:<10} {what}" for name, what in BENCHES.items()))
        return 0 if argv else 2
    if argv[0] not in BENCHES:
        print(f"error: {argv[0]}: no such benchmark\nnext:  python -m ftar_core.bench --help", file=sys.stderr)
        return 2
    if ignored := sorted(name for name in os.environ if name.startswith("FTAR_NET_")):
        print(f"note: {', '.join(ignored)}: not used, each case of a benchmark has its own settings", file=sys.stderr)
    try:
        return int(import_module(f"ftar_core.bench.{argv[0]}").main(argv[1:]))
    except KeyboardInterrupt:  # while it was still being imported: a benchmark itself takes care of its own
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
