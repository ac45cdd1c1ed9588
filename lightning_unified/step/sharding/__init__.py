"""Sharded ranks: parameters, gradients and optimizer state are divided over all ranks (FSDP2).

1. *Wrap* (`wrapping`). The module's repeated blocks become groups of parameters that are gathered together.
"""
