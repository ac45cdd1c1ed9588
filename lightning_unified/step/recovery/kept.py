"""Memory that a module keeps on the device between steps, such as a sampling cache."""

from typing import Any

from torch import nn

from lightning_unified.nn.cuda_graphs import may_be_recorded, release_recordings

__all__ = ["KeptMemory"]


class KeptMemory:
    """Reads a module's `kept_bytes` and calls its `give_back()`.

    A module without them keeps nothing.

    Attributes:
        is_refused: Whether memory was short in this run, so that the module should keep nothing more.
    """

    def __init__(self) -> None:
        self.begin(None)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which begins without a module."""
        return {"_module": None, "is_refused": False}

    def begin(self, module: nn.Module | None) -> None:
        """Begin a run of `module`."""
        self._module: Any = module
        self.is_refused = False

    @property
    def bytes(self) -> int:
        """Bytes that the module keeps now."""
        return int(getattr(self._module, "kept_bytes", 0))

    @property
    def may_be_recorded(self) -> bool:
        """Whether calls of the module are, or may later be, replayed from CUDA graphs."""
        return self._module is not None and may_be_recorded(self._module)

    def give_back(self, *, for_good: bool = False) -> None:
        """Free all memory that the module keeps.

        Where memory was short, also release the CUDA-graph recordings of the module's calls.
        """
        self.is_refused = self.is_refused or for_good
        if self.bytes:
            self._module.give_back()
        if for_good and self._module is not None:
            release_recordings(self._module)
