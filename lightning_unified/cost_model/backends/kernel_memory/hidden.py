"""Table of formulas for the memory inside kernels, by backend and operation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_unified.cost_model.backends.kernel_memory.calls import (
    BACK,
    RESULT,
    Call,
    Kept,
    Order,
    Repair,
    byte_count,
)
from lightning_unified.cost_model.backends.kernel_memory.chunked_loss import chunk_of_gradients, chunk_of_losses
from lightning_unified.cost_model.backends.kernel_memory.cpu_kernels import (
    CPU_TEMPORARIES,
    averaged_losses,
    mixed_operands,
)
from lightning_unified.cost_model.backends.kernel_memory.cuda_kernels import CUDA_TEMPORARIES
from lightning_unified.cost_model.backends.kernel_memory.mkldnn import lstm_temporary, lstm_workspace

__all__ = ["REPAIRS", "SAVED", "Hidden", "hidden_bytes"]


_DROPOUT = torch.ops.aten.native_dropout.default  # it allocates its mask before its result

Entered = TypeVar("Entered")
Taken = TypeVar("Taken")


@dataclass(frozen=True, slots=True)
class Hidden:
    """Memory that one call takes beside its visible results.

    Attributes:
        order: Blocks taken and given back before the call ends, and the places of its results among them.
        saved: Bytes that live as long as the results, because the backward pass reads them or a result's memory exceeds its
            size.
        shrinks: Whether a CPU's kernel keeps more memory for its result than the result has, and this backend's does not.
        last_first: Whether the results are allocated in reverse order.
    """

    order: Order = ()
    saved: int = 0
    shrinks: bool = False
    last_first: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the call takes nothing beside its results, in their order."""
        return self is _NOTHING or self is _SHRINKS

    def replay(
        self,
        results: Sequence[Tensor],
        *,
        enter: Callable[[Tensor], Entered],
        take: Callable[[int], Taken],
        give: Callable[[Taken], None],
        keep: Callable[[int], object] | None = None,
    ) -> list[Entered]:
        """Call `enter` for each result, and `take` and `give` for each block inside the call, in its order.

        Args:
            results: The results of the call.
            enter: Allocates a result.
            take: Allocates a block of so many bytes.
            give: Frees a block.
            keep: Allocates the saved bytes; called while the blocks that the call holds to its end are there.

        Returns:
            What `enter` returned, in the order of allocation.
        """
        waiting = list(results if self.last_first else reversed(results))
        entered = [enter(waiting.pop()) for _ in range(len(waiting) - self.order.count(RESULT))]
        inside: list[Taken] = []
        try:
            for step in self.order:
                if step == BACK:
                    give(inside.pop())
                elif step != RESULT:
                    inside.append(take(step))
                elif waiting:
                    entered.append(enter(waiting.pop()))
            if keep is not None and self.saved and results:
                keep(self.saved)
        finally:  # also where `take` or `enter` is out of memory
            for block in inside:
                give(block)
        return entered


_NOTHING, _MASK_FIRST, _SHRINKS = Hidden(), Hidden(last_first=True), Hidden(shrinks=True)
_LSTM = "aten.mkldnn_rnn_layer"
_CHUNKED = "torch_nn._linear_cross_entropy_batch_chunked"


def _probabilities_are_tested(call: Call) -> int:
    """Return the bytes of a boolean for each entry.

    All scores are compared to find rows that are masked in full.
    """
    return call.args[0].numel()


def _exponentials(call: Call) -> int:
    """Return the bytes of the shifted scores, which are exponentiated in place."""
    return byte_count(call.args[0])


def _losses(call: Call) -> int:
    """Return the bytes of each entry's loss before the reduction."""
    return byte_count(call.args[0]) if call.args[2] else 0


def _weighted_losses(call: Call) -> int:
    """Return the bytes of each entry's loss, for an operation with a weight argument."""
    return byte_count(call.args[0]) if call.args[3] else 0


def _logistic_losses(call: Call) -> int:
    """Return the bytes of the log-sigmoids and of each entry's loss before the reduction."""
    return byte_count(call.args[0]) * (2 if call.args[4] else 1)


def _in_a_row(call: Call) -> int:
    """Return the bytes of copies of non-contiguous operands.

    These are the input in the forward pass, gradient and input in the backward pass.
    """
    tensors = [each for each in call.args[:2] if isinstance(each, Tensor)]
    return sum(byte_count(each) for each in tensors if not each.is_contiguous())


def _backward_variables(call: Call) -> int:
    """Return the bytes of the backward variables of a CTC loss, as many as its forward variables."""
    return byte_count(call.args[6])


# Composite operations, and formulas shared by all backends.
_ANYWHERE: Mapping[str, Repair] = {
    "aten._safe_softmax": _probabilities_are_tested,
    "aten.logsumexp": _exponentials,
    "aten._ctc_loss_backward": _backward_variables,
    "aten.native_layer_norm": _in_a_row,
    "aten.native_layer_norm_backward": _in_a_row,
    "aten.mse_loss": _losses,
    "aten.smooth_l1_loss": _losses,
    "aten.huber_loss": _losses,
    "aten.binary_cross_entropy_with_logits": _logistic_losses,
    _CHUNKED: chunk_of_gradients,
    f"{_CHUNKED}_no_reduction": chunk_of_losses,
}

# Results allocated as large as the input and then resized to a scalar; their memory keeps its size.
_SHRUNK: Mapping[str, Kept] = {
    "aten.mse_loss": _losses,
    "aten.smooth_l1_loss": _losses,
    "aten.soft_margin_loss": _losses,
    "aten.binary_cross_entropy": _weighted_losses,
}

# Operations that copy operands before they allocate results, unless the formula states an order.
_FIRST = (
    "aten._ctc_loss_backward",
    "aten.native_layer_norm",
    "aten.native_layer_norm_backward",
    "aten.convolution",
    "aten.convolution_backward",
    _CHUNKED,
    f"{_CHUNKED}_no_reduction",
)

REPAIRS: Mapping[str, Mapping[str, Repair]] = {
    "cpu": {**_ANYWHERE, **CPU_TEMPORARIES, _LSTM: lstm_temporary, f"{_LSTM}_backward": lstm_temporary},
    "cuda": {**_ANYWHERE, **CUDA_TEMPORARIES},
    "rocm": {**_ANYWHERE, **CUDA_TEMPORARIES},
    "mps": _ANYWHERE,
}
SAVED: Mapping[str, Mapping[str, Kept]] = {
    "cpu": {**_SHRUNK, _LSTM: lstm_workspace},
    "cuda": _SHRUNK,
    "rocm": _SHRUNK,
    "mps": {},
}


def hidden_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, backend: str) -> Hidden:
    """Return the memory that a call takes beside its arguments and visible results.

    Args:
        func: The operation as a dispatch mode sees it: `torch.ops.aten.mm.default`.
        args: Arguments of the call, fake or real.
        kwargs: Keyword arguments of the call.
        result: Result of the call.
        backend: Backend of the kernel: `"cpu"`, `"cuda"`, `"rocm"` or `"mps"`.

    Raises:
        ValueError: For another backend.
    """
    rule = _rule_of(func, backend)
    if isinstance(rule, Hidden):
        return rule
    name, temporary, saved, shrinks = rule
    call = Call(_bound(func, args, kwargs), [each for each in _sequence(result) if isinstance(each, Tensor)])
    if temporary is None and saved is None:
        return Hidden(_order(mixed_operands(name, call)))
    order = _order(temporary(call)) if temporary else ()
    if backend == "cpu":
        order += _order(averaged_losses(name, call))
    if order and name in _FIRST and RESULT not in order:
        order = (*order, *[RESULT] * len(call.results))
    return Hidden(order, saved(call) if saved else 0, shrinks)


@cache
def _rule_of(func: Any, backend: str) -> Hidden | tuple[str, Repair | None, Kept | None, bool]:
    """Return the result for every call of `func`; or its name, its formulas, and whether its result shrinks."""
    if backend not in REPAIRS:
        raise ValueError(f"backend={backend!r} is not known; use one of {', '.join(REPAIRS)}.")
    if func is _DROPOUT:
        return _MASK_FIRST
    name = str(func).rpartition(".")[0]
    temporary, saved = REPAIRS[backend].get(name), SAVED[backend].get(name)
    mixes = backend == "cpu" and torch.Tag.pointwise in getattr(func, "tags", ())
    shrinks = name in _SHRUNK and saved is None
    if temporary is None and saved is None and not mixes:
        return _SHRINKS if shrinks else _NOTHING
    return name, temporary, saved, shrinks


def _order(found: int | Order) -> Order:
    """Return the order without empty blocks, unless a `BACK` may refer to one."""
    order = found if isinstance(found, tuple) else (found,)
    if all(step <= 0 for step in order):
        return ()
    return order if BACK in order else tuple(step for step in order if step)


def _sequence(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (tuple, list)) else (result,)


def _bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Return the arguments in the order of the operation's schema, defaults filled in."""
    rest = func._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest)]
