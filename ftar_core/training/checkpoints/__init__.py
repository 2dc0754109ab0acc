"""Checkpoints for the day when all replicas die: made beside the training, in torch.distributed.checkpoint's format."""
