"""Modules that torch's compiler runs, and the activations that their graphs keep.

| module | content |
|---|---|
| parts | compiled modules, and one graph for any number of rows |
| kept | graphs with exact gradients that keep a share of their activations |
"""

from lightning_unified.nn.compiled.kept import (
    Compiler,
    KeepsShare,
    keeping_share,
    keeps_share,
    mark_kept_values,
)
from lightning_unified.nn.compiled.parts import (
    COMPILED_CALL,
    COMPILED_FORWARDS,
    ORIGINAL,
    compiled_inside,
    compiled_parts,
    is_compiled,
    mark_rows,
    parts_with_graphs,
)

__all__ = [
    "COMPILED_CALL",
    "COMPILED_FORWARDS",
    "ORIGINAL",
    "Compiler",
    "KeepsShare",
    "compiled_inside",
    "compiled_parts",
    "is_compiled",
    "keeping_share",
    "keeps_share",
    "mark_kept_values",
    "mark_rows",
    "parts_with_graphs",
]
