"""The hook that a module's `self.log` is called in, where no hook of Lightning's own is around the call."""

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L

__all__ = ["inside_hook"]


@contextmanager
def inside_hook(module: L.LightningModule, name: str) -> Iterator[None]:
    """Have `self.log` inside the block treat values as logged in the hook `name`, as `Trainer` does around each hook."""
    outer, module._current_fx_name = module._current_fx_name, name
    try:
        yield
    finally:
        module._current_fx_name = outer
