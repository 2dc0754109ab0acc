"""The per-node agent: watches NICs, GPUs and replicas, injects faults and always takes them back."""
