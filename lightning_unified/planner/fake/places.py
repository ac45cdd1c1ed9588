"""Find the module that an operation belongs to.

In the forward pass, it is the innermost open call. In the backward pass, autograd's node numbers lead to it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_unified.cost_model.backends.patching import replaced
from lightning_unified.nn.module_tree.walks import named_modules_of

__all__ = ["Places"]


class Places:
    """Follows the calls of a module's submodules without hooks, which disable fast paths.

    Attributes:
        replay: Returns the result of a module's call, given the module, the call and its arguments; None calls every module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {id(child): name for name, child in named_modules_of(module).items()}
        self._open: list[str] = []
        self._numbers: list[int] = []
        self._at: list[str] = []
        self.replay: Callable[[nn.Module, Callable[[], Any], Any, Any], Any] | None = None

    def here(self) -> str:
        """Return the name of the innermost module that runs; empty outside all of them.

        In a backward pass, it is the module whose forward pass made the current node.
        """
        if self._open:
            return self._open[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        index = bisect_right(self._numbers, node._sequence_nr())
        # nodes that accumulate gradients have numbers beyond all others
        return self._at[index - 1] if 0 < index < len(self._at) else ""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the calls inside the block."""
        called = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self._names.get(id(module))
            if name is None:
                return called(module, *args, **kwargs)
            if self.replay is None:
                return self._inside(name, called, module, args, kwargs)
            inside = partial(self._inside, name, called, module, args, kwargs)
            return self.replay(module, inside, args, kwargs)

        with replaced(nn.Module, "__call__", call):
            yield

    def _inside(self, name: str, called: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._open.append(name)
        self._note()
        try:
            return called(module, *args, **kwargs)
        finally:
            self._open.pop()
            self._note()

    def _note(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._at.append(self._open[-1] if self._open else "")
