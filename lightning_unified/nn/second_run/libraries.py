"""Tell users' classes from those of the standard library, torch, Lightning and this package."""

import sys
from typing import Any

__all__ = ["is_ours", "is_skipped"]

_ENGINES = frozenset(
    {"torch", "lightning", "lightning_unified", "lightning_fabric", "lightning_utilities", "pytorch_lightning"}
)
# In the standard library only these modules hold state that a step changes and that attributes can restore.
_OPAQUE = (_ENGINES | frozenset(sys.stdlib_module_names)) - {"collections", "types", "queue", "__main__"}


def is_ours(kind: type) -> bool:
    """Return whether objects of the class `kind` are skipped by those who look for users' state.

    They skip classes of the standard library, torch, Lightning and this package.
    """
    return is_skipped(kind.__module__)


def is_skipped(module: Any) -> bool:
    """Return whether `module`, the name of a Python module, belongs to one of these libraries."""
    return isinstance(module, str) and module.partition(".")[0] in _OPAQUE
