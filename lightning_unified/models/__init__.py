"""Ready-made models, whose names are imported on first use.

Importing a model therefore does not import Lightning.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package (PEP 562).

    Args:
        package: Name of the package.
        homes: Module of each name, relative to the package.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it offers {', '.join(homes)}.")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return get


SHOWS_ITS_LINES = True
"""Reports of allocations name lines of this package like a user's own."""
