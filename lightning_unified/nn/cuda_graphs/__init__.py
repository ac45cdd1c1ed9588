"""Training calls of a network, recorded as CUDA graphs and replayed."""

from lightning_unified.nn.cuda_graphs.addresses import graphs_exist, owns_memory, users
from lightning_unified.nn.cuda_graphs.contexts import eager_calls, no_new_recordings
from lightning_unified.nn.cuda_graphs.graphs import (
    RecordedCalls,
    gather_gradients,
    is_recorded,
    may_be_recorded,
    release_recordings,
    replayed_parts,
)

__all__ = [
    "RecordedCalls",
    "eager_calls",
    "gather_gradients",
    "graphs_exist",
    "is_recorded",
    "may_be_recorded",
    "no_new_recordings",
    "owns_memory",
    "release_recordings",
    "replayed_parts",
    "users",
]
