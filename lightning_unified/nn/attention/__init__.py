"""Exact attention without the matrix of all scores.

`ChunkedAttention` replaces torch's `scaled_dot_product_attention` under every name that is loaded, until it is removed.
"""

from lightning_unified.nn.attention.chunks import queries_of_chunk
from lightning_unified.nn.attention.replacing import ChunkedAttention, attends_by_itself

__all__ = ["ChunkedAttention", "attends_by_itself", "queries_of_chunk"]
