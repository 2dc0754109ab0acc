"""Benchmarks that a stranger can run again: every figure beside its peer, in one run, as a ratio.

`python -m ftar_core.bench` lists them. Figures of small machines are noisy: compare ratios, not times.
"""
