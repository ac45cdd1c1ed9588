"""Find the arguments that a block writes in place, and copy them right before."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_unified.nn.second_run.modes import BlockMode

__all__ = ["CopiesBeforeWrites", "copy_of"]


class CopiesBeforeWrites(BlockMode):
    """Dispatch mode that copies each watched tensor before the first operation that writes it.

    A tensor is also copied before its storage is written through another one.

    Args:
        watched: Tensors, by a key.

    Attributes:
        copies: The copies, by key.
    """

    def __init__(self, watched: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._watched = watched
        self._storages = {key: _storage_of(one) for key, one in watched.items()}
        self.copies: dict[int, Tensor] = {}

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for index, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = args[index] if index < len(args) else kwargs.get(argument.name)
                    for one in written if isinstance(written, list | tuple) else (written,):
                        self._copy(one)
        return func(*args, **kwargs)

    def _copy(self, written: Any) -> None:
        if not isinstance(written, Tensor) or len(self.copies) == len(self._watched):
            return
        storage = _storage_of(written)
        for key, tensor in self._watched.items():
            shares = storage is not None and storage is self._storages[key]
            if key not in self.copies and (written is tensor or shares):
                self.copies[key] = copy_of(tensor)


def _storage_of(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # a tensor subclass, or a sparse tensor
        return None


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy without history that requires a gradient if `tensor` does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
