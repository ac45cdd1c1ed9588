"""Compiled modules: recognise them, and let one graph serve any number of rows."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["COMPILED_CALL", "compiled_parts", "is_compiled", "mark_rows"]

COMPILED_CALL = "_compiled_call_impl"  # set by `nn.Module.compile`; torch leaves it out of copies and saved files


def is_compiled(module: nn.Module) -> bool:
    """Return whether the user or this package compiled the module's call."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    is_wrapper = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return is_wrapper or vars(module).get(COMPILED_CALL) is not None


def compiled_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost compiled modules in `module` by name.

    The graph of each contains the modules inside it.
    """
    if is_compiled(module):
        return {"": module}
    found = {}
    for name, child in module.named_children():
        found |= {f"{name}.{inner}" if inner else name: part for inner, part in compiled_parts(child).items()}
    return found


def mark_rows(arguments: Iterable[Any]) -> None:
    """Tell the compiler that the number of rows changes.

    This concerns all tensors with as many entries as the first one has. A graph for a single row stays one of its
    own.
    """
    tensors = [leaf for leaf in tree_leaves(list(arguments)) if isinstance(leaf, Tensor) and leaf.dim()]
    rows = tensors[0].shape[0] if tensors else 1
    for tensor in tensors:
        if rows > 1 and tensor.shape[0] == rows:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
