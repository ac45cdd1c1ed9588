"""Read macOS's page counters, which no sysctl has: pages swapped out and pages decompressed."""

import struct
from dataclasses import dataclass

from lightning_unified.hardware.sources import Sources

__all__ = ["PageCounters", "read_page_counters"]

# struct vm_statistics64 (xnu, osfmk/mach/vm_statistics.h): free, active, inactive, wire; nine counters of 64 bits from zero_fill
# to purges; purgeable, speculative; decompressions, compressions, swapins, swapouts; four counts; one of 64 bits. Later
# versions only append.
_LAYOUT = struct.Struct("=4I 9Q 2I 4Q 4I Q")
_DECOMPRESSIONS, _SWAPOUTS = 15, 18


@dataclass(frozen=True, kw_only=True, slots=True)
class PageCounters:
    """Bytes since boot: `swapped_out` to the disk, `decompressed` on access to compressed pages."""

    swapped_out: int
    decompressed: int


def read_page_counters(sources: Sources) -> PageCounters | None:
    """Return the counters, None if the machine has none. Needs no privileges and never waits."""
    raw, page = sources.vm_info(), sources.sysctl("hw.pagesize")
    if raw is None or len(raw) < _LAYOUT.size or not isinstance(page, int):
        return None
    counts = _LAYOUT.unpack_from(raw)
    return PageCounters(swapped_out=counts[_SWAPOUTS] * page, decompressed=counts[_DECOMPRESSIONS] * page)
