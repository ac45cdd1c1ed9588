"""Compiled modules: recognise them, and let one graph serve any number of rows."""

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves

__all__ = [
    "COMPILED_CALL",
    "COMPILED_FORWARDS",
    "ORIGINAL",
    "compiled_inside",
    "compiled_parts",
    "is_compiled",
    "mark_rows",
    "parts_with_graphs",
]

ORIGINAL = "_torchdynamo_orig_callable"  # torch sets it on the functions that `torch.compile` returns
COMPILED_CALL = "_compiled_call_impl"  # set by `nn.Module.compile`; torch leaves it out of copies and saved files

COMPILED_FORWARDS: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Modules of which this package compiled the forward alone.

Their hooks run outside of the graph.
"""


def is_compiled(module: nn.Module) -> bool:
    """Return whether the user or this package compiled the module's call."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    is_wrapper = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    call = vars(module).get(COMPILED_CALL)
    is_called = call is not None and not getattr(call, "only_records", False)
    return is_wrapper or is_called or module in COMPILED_FORWARDS


def compiled_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost compiled modules in `module` by name.

    The graph of each contains the modules inside it.
    """
    if is_compiled(module):
        return {"": module}
    return compiled_inside(module)


def compiled_inside(module: nn.Module) -> dict[str, nn.Module]:
    """Return `compiled_parts` of the module's children."""
    found = {}
    for name, child in module.named_children():
        found |= {_joined(name, inner): part for inner, part in compiled_parts(child).items()}
    return found


def parts_with_graphs(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules that torch's compiler runs as graphs, by name.

    Before torch 2.14, the compiler begins no graph in the forward of torch's own modules. After `nn.Sequential(...).compile()`, it runs each
    of the user's modules inside as a graph, and after `nn.TransformerEncoderLayer(...).compile()` all of it eagerly. `torch.compile(module)`
    has no such exception.

    A module with a recurrent layer is left out: its graph breaks there, so that it saves tensors as eager code does.
    """
    found: dict[str, nn.Module] = {}
    for name, part in compiled_parts(module).items():
        found |= {
            _joined(name, inner): child for inner, child in _with_graphs(part).items() if not _is_recurrent(child)
        }
    return found


def _is_recurrent(part: nn.Module) -> bool:
    """Return whether the compiler breaks the graph of `part` at a recurrent layer.

    Source: torch/_dynamo/variables/builder.py.
    """
    has_layer = any(isinstance(child, (nn.RNN, nn.GRU, nn.LSTM)) for child in part.modules())
    return has_layer and not torch._dynamo.config.allow_rnn


def _with_graphs(part: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules with graphs in a part that is compiled."""
    call = vars(part).get(COMPILED_CALL)
    is_in_place = call is not None and hasattr(call, ORIGINAL)
    return _outside_torch(part) if is_in_place and TorchVersion(torch.__version__) < "2.14" else {"": part}


def _outside_torch(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules in `module` whose forward is not torch's."""
    if not type(module).forward.__module__.startswith("torch.nn."):
        return {"": module}
    return {
        _joined(name, inner): found
        for name, child in module.named_children()
        for inner, found in _outside_torch(child).items()
    }


def _joined(outer: str, inner: str) -> str:
    return ".".join(filter(None, (outer, inner)))


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
