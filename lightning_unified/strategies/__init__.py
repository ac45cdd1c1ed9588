"""The strategies that a Trainer takes: `unified` and `unified_ddp`."""

from lightning_unified.strategies.ddp import UnifiedDDPStrategy
from lightning_unified.strategies.unified import UnifiedStrategy

__all__ = ["UnifiedDDPStrategy", "UnifiedStrategy"]
