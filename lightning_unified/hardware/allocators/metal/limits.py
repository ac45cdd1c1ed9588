"""Metal's two watermarks, as one allocation meets them."""

from dataclasses import dataclass

from lightning_unified.units import MIB

__all__ = ["MetalLimits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MetalLimits:
    """Watermarks in bytes; None is no limit.

    Attributes:
        high: Most bytes that the driver may hold for the process.
        low: Bytes from which the allocator is short of memory.
        others: Bytes that the driver holds for the process beside the heaps.
        lowest: Bytes below which `allow` is known to be true; a replay would ask a million times.

    Source:
        torch's MPSAllocator.mm: `get_free_buffer`, `getLowWatermarkValue`; the same comparisons in the macOS wheels of torch
        2.13.0 and 2.14.1.
    """

    high: float | None = None
    low: float | None = None
    others: int = 0
    lowest: float = 0.0

    def allow(self, size: int, reserved: int) -> bool:
        """Return whether a block of `size` may be given, while the heaps hold `reserved` bytes.

        Metal counts the block itself, even if it needs no new heap, and ignores the size of a heap that it opens.
        """
        return self.high is None or reserved + self.others + size <= self.high

    def are_near(self, reserved: int) -> bool:
        """Return whether memory is short; the distance to the low watermark counts in whole MiB."""
        return self.low is not None and self.low - self.others - reserved < MIB

    def excess(self, reserved: int) -> float:
        """Return the bytes above the low watermark, 0 below it."""
        return 0 if self.low is None else max(0, reserved + self.others - self.low)
