"""Let the segments of torch's CUDA allocator expand, where memory is short."""

from typing import Any

from lightning_unified.hardware.environment.cuda import ALLOCATOR_VARIABLES, is_one_pool_board
from lightning_unified.hardware.sources import Sources, read_text

__all__ = ["expand_segments", "segments_expand"]

_KEY = "expandable_segments"


def segments_expand(*, sources: Sources | None = None) -> bool:
    """Return whether the user's environment lets segments expand."""
    return _entries(sources or Sources.live()).get(_KEY) == "True"


def expand_segments(device: Any, *, sources: Sources | None = None) -> bool:
    """Let the segments of the process's CUDA allocator expand from now on; return whether they do.

    Freed memory between tensors in use then serves larger tensors, because its pages are mapped elsewhere. So a step reserves little
    more than it uses. Segments that exist stay as they are. The user's own setting of `expandable_segments` stays too, and another allocator
    than torch's own. The setting is left alone on AMD GPUs, on boards whose GPU uses the host's memory, under Windows and under WSL.

    Source:
        torch's CUDACachingAllocator.cpp, `ExpandableSegment`: CUDA's virtual memory management, for Linux. Not run on boards.
    """
    sources = sources or Sources.live()
    entries, torch = _entries(sources), sources.torch
    if segments_expand(sources=sources):
        return True
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    is_card = str(device).partition(":")[0] == "cuda" and getattr(torch.version, "hip", None) is None
    is_linux = sources.platform == "linux" and "microsoft" not in (read_text(sources.proc / "version") or "").casefold()
    is_native = entries.get("backend", "native") == "native"
    if change is None or _KEY in entries or not (is_card and is_linux and is_native) or is_one_pool_board(sources):
        return False
    change(",".join([*(f"{key}:{value}" for key, value in entries.items()), f"{_KEY}:True"]))
    return True


def _entries(sources: Sources) -> dict[str, str]:
    """Return the allocator settings in the environment, by key."""
    text = next((sources.environ[name] for name in ALLOCATOR_VARIABLES if sources.environ.get(name)), "")
    pairs = (entry.partition(":") for entry in text.split(","))
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
