"""Memory that kernels allocate inside, which fake tensors do not show.

`hidden.py` maps operations to formulas, by backend; the other files hold the formulas.
"""
