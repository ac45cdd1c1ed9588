"""GearHead: a small language model for equipment diagnostics.

Its names are imported on first use, so that importing the package does not import Lightning.
"""

from typing import TYPE_CHECKING

from lightning_unified.models import lazy_exports

if TYPE_CHECKING:
    from lightning_unified.models.gearhead.diagnoser import Diagnoser
    from lightning_unified.models.gearhead.module import GearHead
    from lightning_unified.models.gearhead.sizes import GearHeadConfig

__all__ = ["Diagnoser", "GearHead", "GearHeadConfig"]

__getattr__ = lazy_exports(__name__, {"Diagnoser": "diagnoser", "GearHead": "module", "GearHeadConfig": "sizes"})
