"""Training calls of a network, recorded as CUDA graphs and replayed."""

from lightning_unified.nn.cuda_graphs.graphs import (
    RecordedCalls,
    eager_calls,
    is_recorded,
    may_be_recorded,
    no_new_recordings,
    release_recordings,
    replayed_parts,
)

__all__ = [
    "RecordedCalls",
    "eager_calls",
    "is_recorded",
    "may_be_recorded",
    "no_new_recordings",
    "release_recordings",
    "replayed_parts",
]
