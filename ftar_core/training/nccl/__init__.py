"""The data plane over NCCL (plane.py says how): chosen by `Session(data_plane="nccl")`, imported only then."""
