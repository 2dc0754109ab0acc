"""A GPU library without GPUs (nvml.cpp); agents/host/simgpus.py writes its state."""
