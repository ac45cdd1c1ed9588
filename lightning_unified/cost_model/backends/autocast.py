"""Apply the target's autocast lists to fake CPU tensors.

`torch.autocast` on a CPU lowers and raises other operations than on CUDA or MPS. Layer normalisation, softmax, powers and
sums run in float32 there and in half precision on a CPU. CPU autocast stays active, with its cache of lowered weights. Only
operations on which the lists differ are cast here, before CPU autocast sees them.

torch's dispatcher says which operations the target's autocast knows, so a release that changes the lists is followed. The
tables below say how each is cast. Source: `autocast_mode.h` and `autocast_mode.cpp` of torch, and its documentation of
autocast.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["Cast", "casts_of"]

Operation = Callable[..., Any]
Cast = Callable[[Operation, tuple[Any, ...], dict[str, Any]], Any]

_LOW = (torch.float16, torch.bfloat16)

_RAISED = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "batch_norm",
    "frobenius_norm", "nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss",
    "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
_RAISED_INSIDE = (
    "sum",
    "prod",
    "cumsum",
    "cumprod",
    "linalg_vector_norm",
    "linalg_matrix_norm",
)  # read half precision, sum in float32
_SOFTMAX = ("softmax", "log_softmax")
_PROMOTED = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip
_LOWERED = (
    "addmv", "addr", "mv", "einsum", "chain_matmul", "linalg_multi_dot", "scaled_dot_product_attention", "lstm_cell",
    "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
)  # fmt: skip
_OF_CAST_PARTS = ("pad", "stft", "istft", "hstack", "vstack", "dstack", "column_stack", "row_stack", "block_diag")
"""Operations that run others inside, which CPU autocast knows and no other."""

_KEYS = {"cuda": "AutocastCUDA", "rocm": "AutocastCUDA", "mps": "AutocastMPS"}


def casts_of(backend: str) -> Mapping[str, Cast]:
    """Return the casts on which the target's autocast differs from the CPU's, by operation."""
    key = _KEYS[backend]
    halves = (torch.float16,) if key == "AutocastCUDA" else ()
    casts: dict[str, Cast] = {}
    casts |= {name: _raised for name in _RAISED if _casts(name, key) and not _casts(name, "AutocastCPU")}
    casts |= {name: _raised_inside for name in _RAISED_INSIDE if _casts(name, key)}
    casts |= {name: _softmax(name, halves=halves) for name in _SOFTMAX if _casts(name, key)}
    casts |= {name: _promoted for name in _PROMOTED if _casts(name, key)}
    casts |= {name: _lowered for name in _LOWERED if _casts(name, key)}
    casts |= {name: _run for name in _cast_on_the_cpu() if not _casts(name, key)}
    casts["cross_entropy_loss"] = _cross_entropy
    return casts


def _casts(name: str, key: str) -> bool:
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(each, key) for each in _overloads().get(f"aten::{name}", ())
    )


@cache
def _cast_on_the_cpu() -> Sequence[str]:
    """Return the operations that CPU autocast knows.

    The target runs the operations it does not know in the dtypes they get.
    """
    names = [name.removeprefix("aten::") for name in _overloads() if name.startswith("aten::")]
    return [*_OF_CAST_PARTS, *(name for name in names if _casts(name, "AutocastCPU"))]


@cache
def _overloads() -> Mapping[str, Sequence[str]]:
    names: dict[str, list[str]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        names.setdefault(name.partition(".")[0], []).append(name)
    return names


def _to(dtype: torch.dtype, arguments: Any) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor

    return tree_map_only(Tensor, cast, arguments)


def _run(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C._DisableAutocast():
        return operation(*args, **kwargs)


def _raised(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _run(operation, _to(torch.float32, args), _to(torch.float32, kwargs))


def _raised_inside(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _first(args, kwargs).dtype in _LOW and kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": torch.float32}
    return _run(operation, args, kwargs)


def _lowered(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = torch.get_autocast_dtype("cpu")
    return _run(operation, _to(dtype, args), _to(dtype, kwargs))


def _promoted(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    seen: list[torch.dtype] = []
    tree_map_only(Tensor, lambda tensor: seen.append(tensor.dtype), (args, kwargs))
    if torch.float32 in seen and any(dtype in _LOW for dtype in seen):
        args, kwargs = _to(torch.float32, args), _to(torch.float32, kwargs)
    return _run(operation, args, kwargs)


def _softmax(name: str, *, halves: tuple[torch.dtype, ...]) -> Cast:
    """Return a cast to float32; kernels of dtypes in `halves` read half precision uncopied."""
    fused = getattr(torch, f"_{name}")

    def cast(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = _first(args, kwargs)
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if first.dtype in halves and kwargs.get("dtype") is None and len(args) <= 2:
            return _run(fused, (first, dim, True), {})
        return _run(operation, _to(torch.float32, args), _to(torch.float32, kwargs))

    return cast


def _cross_entropy(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast inside cross entropy: log-softmax keeps the logits' precision; its results are raised.

    Source:
        torch's LossNLL.cpp `cross_entropy_loss`, which autocast leaves alone; a GPU's allocations under bfloat16 confirm it
        (tests/cost_model/memory/recorded/gpt.json.gz).
    """

    def low(
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Any:
        if logits.dtype not in _LOW:
            return _raised(operation, (logits, target, weight, reduction, ignore_index, label_smoothing), {})
        classes = min(logits.dim() - 1, 1)
        logs = torch.ops.aten._log_softmax(logits, classes, half_to_float=False)
        wide = (logits.shape[classes], *[1] * (logits.dim() - 1 - classes))
        if target.shape == logits.shape:
            target = target * (1 - label_smoothing) + label_smoothing / wide[0] if label_smoothing else target
            products = logs * target if weight is None else logs * target * weight.view(wide)
            return _reduced(products.sum(classes, dtype=torch.float32), reduction).neg()
        loss = torch.ops.aten.nll_loss_nd(
            logs.float(), target, None if weight is None else weight.float(), reduction, ignore_index
        )
        if not label_smoothing:
            return loss
        sums = (logs if weight is None else logs * weight.view(wide)).sum(classes, dtype=torch.float32).neg()
        smooth = _reduced(sums.masked_fill_(target == ignore_index, 0.0), reduction)
        return (1 - label_smoothing) * loss + smooth * (label_smoothing / wide[0])

    return _run(low, args, kwargs)


def _reduced(losses: Tensor, reduction: int) -> Tensor:
    return losses.mean() if reduction == 1 else losses.sum() if reduction else losses


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else next(kwargs[name] for name in ("input", "self", "x") if name in kwargs)
