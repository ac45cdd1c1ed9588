"""Floor 4: the strategies, and their registration by name."""

from lightning_unified.strategies.ddp import UnifiedDDPStrategy
from lightning_unified.strategies.unified import UnifiedStrategy

__all__ = ["UnifiedDDPStrategy", "UnifiedStrategy"]
