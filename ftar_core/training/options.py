"""Options of a training session that hardly anybody has to change."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TrainingOptions:
    """What hardly anybody has to change. Sizes in bytes, times in seconds."""

    bucket_bytes: int = 0  # 0: 4 MiB, or a quarter of the gradients where that is less (plan.py)
    # Gradients are added up in this type, whatever their own: torch.bfloat16 halves the bytes of float32 ones,
    # torch.float32 keeps more digits of bfloat16 ones. None: in their own.
    reduce_dtype: torch.dtype | None = None
    # Steps that wait to be replayed; a shadow that is further behind starts again. 0: FTAR_REPLAY_BUFFER, or a quarter
    # of the memory that is available.
    stream_buffer_bytes: int = 0
    # The longest wait of an update for a copy of the state, when copies do not get done within a step.
    snapshot_wait_s: float = 1.0
    # Where gradients are until the step is committed: auto, device, host or recompute (retention.py); at most so many
    # bytes of them (0: what there is memory for).
    retain: str = "auto"
    retain_bytes: int = 0
    # data_plane="nccl": so long may NCCL take to connect the members of an epoch (longer is an error of the epoch), and
    # to abort a communicator (longer ends the process).
    nccl_join_s: float = 120.0
    nccl_abort_s: float = 30.0
    # Where gradients of a GPU are added up (memories.py): "host", "device", or as FTAR_REDUCE says ("").
    reduce: str = ""
    warm_up_steps: int = 2
    first_steps: int = 2  # of a process: libraries compile and allocate in them
    first_steps_budget_s: float = 600.0  # so long each of them, and starting and catching up, may take
    end_grace_s: float = 10.0  # then a training thread that hangs is not waited for
