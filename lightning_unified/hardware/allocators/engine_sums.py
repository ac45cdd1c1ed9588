"""Sums of gradients that the backward engine forms in place, but not under a dispatch mode.

Autograd adds a second gradient into the memory of the first, unless the first is a view (`can_accumulate_inplace` in
torch/csrc/autograd/input_buffer.cpp), and writes gradients of indexed entries in place (`index_backward` in
torch/csrc/autograd/FunctionsManual.cpp). Under a dispatch mode it does neither. A mode that counts memory finds such sums here: the sum
takes its first term's memory if that term is freed before anything else happens.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["first_term", "may_be_sum"]

_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.index_put.default)
# torch/autograd/graph.py: the only frame below operations of built-in backward formulas
_ENGINE = "_engine_run_backward"
_WRAPPERS = ("_python_dispatch.py", "_compile.py", "eval_frame.py", "recorder.py", "counting.py", "engine_sums.py")


def may_be_sum(func: Any) -> bool:
    """Return whether the backward engine forms sums of gradients by `func`."""
    return func in _SUMS


def first_term(func: Any, args: Sequence[Any]) -> Tensor | None:
    """Return the first term of a sum of gradients that the backward engine forms; else None.

    A view's base holds its memory too, and the engine adds in place only into memory with one owner. So a view is no such term.
    """
    if func not in _SUMS or torch.is_grad_enabled():
        return None
    term = args[0]
    return term if isinstance(term, Tensor) and not term._is_view() and _called_by_engine() else None


def _called_by_engine() -> bool:
    """Return whether the backward engine called this operation through torch's frames only."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == _ENGINE
