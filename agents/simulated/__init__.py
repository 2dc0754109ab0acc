"""Machines that are not there: GPUs behind a library of ours (nvml.cpp), and whole nodes in memory (fleet.py)."""
