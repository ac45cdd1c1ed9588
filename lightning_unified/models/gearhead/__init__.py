"""GearHead: a small language model for equipment diagnostics.

The names below are imported on first use, so that importing the package does not import Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_unified.models.gearhead.diagnoser import Diagnoser
    from lightning_unified.models.gearhead.module import GearHead
    from lightning_unified.models.gearhead.sizes import GearHeadConfig

__all__ = ["Diagnoser", "GearHead", "GearHeadConfig"]

_HOMES = {"Diagnoser": "diagnoser", "GearHead": "module", "GearHeadConfig": "sizes"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}.")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
