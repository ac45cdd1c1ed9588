"""Recordings of allocators and kernels that the cost model is fitted to and tested with."""
