"""Compiled modules on fake tensors: the graphs of torch's compiler, and the memory of their tensors."""
