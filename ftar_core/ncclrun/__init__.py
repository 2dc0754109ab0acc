"""A job of processes that move bytes through the NCCL plugin as NCCL does, on machines without GPUs: one a rank.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=7620 python -m ftar_core.ncclrun --rails eth1,eth2

The environment is torchrun's; the plugin is set up by `ftar_core.nccl.enable`, loaded, and driven through its C
interface (ncclabi.py). Every rank sends to every other over `--channels` connections, in rounds: a burst of messages of
several sizes, then a pause. A byte's value depends on the connection, the message and its place in it, and the receiver
looks at every one, at what lies behind the message, and at the buffer once more before it is used again.

The ranks exchange handles over TCP at rank 0, as NCCL does over its bootstrap, and keep those connections: when one
closes, a rank is gone and the job cannot go on. Exit codes (ftar_core/wire/exits.py): 0 all rounds done, or SIGTERM;
1 a byte was wrong; 2 wrong settings; 75 a peer is gone: start again.
"""
