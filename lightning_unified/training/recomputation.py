"""Whether a fit keeps activations or recomputes them in the backward pass, and how that came about."""

import logging
from typing import Literal

import lightning as L

from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.blocks import find_blocks
from lightning_unified.nn.recomputing import Recomputing

__all__ = ["Recomputation"]

log = logging.getLogger("lightning_unified")


class Recomputation:
    """Turns recomputation on for a module: by the module's own `recompute` attribute, else block by block.

    A module with that attribute (a bool that its forward reads) knows best; it is set and nothing else is done. Any other is made
    to recompute by standing in for the `forward` of its blocks, declared or detected, until `end`.

    Args:
        asked: True or False from the start, or `"auto"`: as the module is, until `more` is called for want of memory.

    Attributes:
        on: Whether activations are recomputed; None where the module is as it is and does not say.
        reason: Why, and which blocks.

    Raises:
        ConfigurationError: If `asked` is none of the three.
    """

    def __init__(self, asked: bool | Literal["auto"]) -> None:
        if asked not in ("auto", True, False):
            raise ConfigurationError(f'recompute={asked!r}: give true, false or "auto".')
        self._asked = asked
        self._module: L.LightningModule | None = None
        self._blocks: Recomputing | None = None
        self._switched_by_us = False
        self.on: bool | None = None if asked == "auto" else bool(asked)
        self.reason = "as asked" if asked != "auto" else "as the module is"

    def begin(self, module: L.LightningModule) -> None:
        """Begin a fit of `module`, as asked.

        Raises:
            ConfigurationError: If recomputation was asked for and there is nothing to recompute.
        """
        self.end()
        self._module = module
        switch = _has_switch(module)
        if self._asked == "auto":
            self.on, self.reason = bool(module.recompute) if switch else None, "as the module is"
        elif switch:
            module.recompute = self._asked  # type: ignore[assignment]
            self.on, self.reason = bool(self._asked), f"as asked, by {type(module).__name__}.recompute"
        elif self._asked:
            self._stand_in(module, "as asked")

    def more(self, why: str) -> bool:
        """Turn recomputation on, where that was left open; return whether it made a difference."""
        module = self._module
        if module is None or self._asked != "auto" or self.on:
            return False
        if _has_switch(module):
            module.recompute = True  # type: ignore[assignment]
            self._switched_by_us, self.on, self.reason = True, True, f"{why}, by {type(module).__name__}.recompute"
            return True
        try:
            self._stand_in(module, why)
        except ConfigurationError as error:
            self.reason = f"as the module is: {error}"
        return self._blocks is not None

    def _stand_in(self, module: L.LightningModule, why: str) -> None:
        try:
            blocks = find_blocks(module)
        except ValueError as error:
            raise ConfigurationError(
                f"recompute={self._asked}: {error} A module that recomputes by itself has a `recompute` attribute to set."
            ) from error
        plain = blocks.plain
        if not plain:
            self.on, self.reason = True, f"as the module is: {blocks}"
            return
        self._blocks = Recomputing(plain)
        self.on, self.reason = True, f"{why}: {blocks}"
        log.info("Activations are recomputed in the backward pass, %s.", self.reason)

    def end(self) -> None:
        """Leave the module as it was before `begin`; what was asked of its own attribute stays."""
        if self._blocks is not None:
            self._blocks.remove()
        if self._switched_by_us and self._module is not None:
            self._module.recompute = False  # type: ignore[assignment]
        self._blocks, self._switched_by_us, self._module = None, False, None


def _has_switch(module: L.LightningModule) -> bool:
    return hasattr(module, "recompute") and not callable(module.recompute)
