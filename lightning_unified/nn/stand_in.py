"""Replace the call of one module, and log once why a replacement does nothing."""

import copy
import logging
import operator
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_unified.nn.compiled import COMPILED_CALL

__all__ = ["FORWARD", "StandIn", "call_slot", "warn_once"]

FORWARD = "forward"

log = logging.getLogger("lightning_unified")


class StandIn:
    """Replace one module's `forward` or compiled call; copies and saved files hold the original.

    A derived class defines `__call__`.

    Args:
        module: The module whose call is replaced.
        slot: The attribute that is replaced, `"forward"` or that of a compiled call.

    Attributes:
        module: As given.
        function: The module's call without the replacement.
        is_on: Whether the replacement is in use. Another wrapper may call it after `remove`.
    """

    def __init__(self, module: nn.Module, slot: str) -> None:
        self.module, self._slot = module, slot
        self._own = vars(module).get(slot)
        self.function: Callable[..., Any] = getattr(module, slot)
        self.is_on = True

    def install(self) -> None:
        """Replace the call."""
        vars(self.module)[self._slot] = self

    def remove(self) -> None:
        """Restore the call, unless another wrapper lies on top and calls this one."""
        self.is_on = False
        if vars(self.module).get(self._slot) is self:
            self.restore()

    def restore(self) -> None:
        """Restore the call, whatever has replaced it since."""
        if self._own is None:
            del vars(self.module)[self._slot]
        else:
            vars(self.module)[self._slot] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.function, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ((self.function,), 0)


def call_slot(module: nn.Module) -> str:
    """Return the attribute that calls a module: its compiled call if compiled in place."""
    return FORWARD if vars(module).get(COMPILED_CALL) is None else COMPILED_CALL


def warn_once(said: set[str], text: str) -> None:
    """Log `text` as a warning, unless it is in `said`; add it there."""
    if text not in said:
        said.add(text)
        log.warning("%s", text)
