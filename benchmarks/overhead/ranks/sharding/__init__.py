"""One rank of each side of `benchmarks/overhead/ranks/sharded_ranks.py`."""

__all__ = ["WARM"]

WARM = 3
"""Steps before the counted ones, which plan, load kernels and make the optimizer's state."""
