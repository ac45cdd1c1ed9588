"""Note the scalars that a step computes, by the autograd node that made each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from typing_extensions import override

from lightning_unified.nn.autograd_limits import in_a_transform
from lightning_unified.nn.compiled import COMPILED_CALL, compiled_parts

__all__ = ["NoteScalars", "left_in_compiled_parts"]

Edge = tuple[Any, int]


class NoteScalars(BaseTorchFunctionMode):
    """Notes the value of each scalar with a gradient that the code inside computes.

    Autograd's graph holds no values of sums, and an operation in place overwrites them, so they are copied. Code that torch compiles must not
    run inside: torch would compile it anew for the mode.

    Attributes:
        values: The scalars, by their edge: the node that made each, and the number of its output.
        is_active: Whether the mode is entered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Edge, Tensor] = {}
        self.is_active = False

    @override
    def __enter__(self) -> Self:
        self.is_active = True
        return super().__enter__()

    @override
    def __exit__(self, *of_error: object) -> None:
        self.is_active = False
        super().__exit__(*of_error)

    @override
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if type(result) is Tensor and _is_scalar(result) and (node := result.grad_fn) is not None:
            edge = (node, result.output_nr)
            if edge not in self.values and not (result.is_cuda and torch.cuda.is_current_stream_capturing()):
                self.values[edge] = result.detach().clone()
        return result


def _is_scalar(result: Tensor) -> bool:
    if torch.compiler.is_compiling() or in_a_transform() or result.layout != torch.strided or result.is_nested:
        return False
    return result.numel() == 1 and not (result.is_complex() or result.is_meta)


@contextmanager
def left_in_compiled_parts(module: nn.Module, mode: NoteScalars) -> Iterator[None]:
    """Leave the mode, which is the innermost, while a compiled part of the module runs inside the block.

    Args:
        module: The module.
        mode: The mode.
    """
    with ExitStack() as undo:
        for part in compiled_parts(module).values():
            name = next((one for one in (COMPILED_CALL, "forward") if vars(part).get(one) is not None), None)
            if name is not None:
                undo.callback(vars(part).__setitem__, name, vars(part)[name])
                vars(part)[name] = partial(_outside, mode, vars(part)[name])
        yield


def _outside(mode: NoteScalars, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not mode.is_active:
        return call(*args, **kwargs)
    mode.__exit__(None, None, None)
    try:
        return call(*args, **kwargs)
    finally:
        mode.__enter__()
