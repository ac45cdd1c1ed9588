"""Bytes that a run needs before any activation: weights, gradients, optimizer state, buffers."""

from collections.abc import Collection, Iterable

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_unified.cost_model.memory.reserve import pools_of
from lightning_unified.errors import ConfigurationError
from lightning_unified.hardware.allocators.settings import AllocatorSettings
from lightning_unified.units import format_bytes

__all__ = ["describe_bytes", "describe_shortage", "metal_heap_bytes", "static_bytes", "tensor_bytes"]

# State tensors as large as the parameter, by optimizer class (torch/optim/*.py). SGD's state depends on its momentum.
_STATES_PER_PARAMETER: dict[type[Optimizer], int] = {
    torch.optim.Adam: 2,
    torch.optim.AdamW: 2,
    torch.optim.NAdam: 2,
    torch.optim.RAdam: 2,
    torch.optim.Adamax: 2,
    torch.optim.Adadelta: 2,
    torch.optim.Adagrad: 1,
    torch.optim.Muon: 1,
    torch.optim.RMSprop: 1,
    torch.optim.Rprop: 2,
    torch.optim.ASGD: 1,
}
# Options that add a state tensor each, besides `amsgrad`.
_MORE_STATES: dict[type[Optimizer], tuple[str, ...]] = {torch.optim.RMSprop: ("momentum", "centered")}


def static_bytes(module: torch.nn.Module, optimizers: Iterable[Optimizer] = ()) -> dict[str, int]:
    """Return bytes by category; a shared parameter counts once.

    Args:
        module: Module with its parameters in their final dtype; they may be on the meta device.
        optimizers: Optimizers of the run. Existing state counts as it is; state not created yet is derived from the
            optimizer's class. An optimizer of unknown class, such as torchao's 8-bit ones, counts 0 before its first step and
            its real state after it.

    Raises:
        ConfigurationError: If the module has lazy layers that have not run yet, so their weights have no size.
    """
    parameters = list(module.parameters())
    lazy = [name for name, one in (*module.named_parameters(), *module.named_buffers()) if is_lazy(one)]
    if lazy:
        raise ConfigurationError(
            f"{type(module).__name__} has {len(lazy)} weights of lazy layers that have no size yet, the first {lazy[0]}; a strategy that plans "
            "memory needs their sizes before the first step. Run the layers once on an example, in __init__ or in configure_model."
        )
    return {
        "weights": sum(tensor_bytes(parameter) for parameter in parameters),
        "gradients": sum(tensor_bytes(parameter) for parameter in parameters if parameter.requires_grad),
        "optimizer state": sum(_optimizer_bytes(optimizer) for optimizer in optimizers),
        "buffers": sum(tensor_bytes(buffer) for buffer in module.buffers()),
    }


def metal_heap_bytes(module: torch.nn.Module, *, settings: AllocatorSettings) -> int:
    """Return the bytes of Metal's heaps for a module's weights and buffers.

    One large tensor can take a heap of 1 GiB.

    Parameters have their final dtype; they may be on the meta device.
    """
    pools = pools_of("mps", settings)
    for tensor in (*module.parameters(), *module.buffers()):
        if count := tensor_bytes(tensor):
            size = pools.rounded(count)
            if pools.reuse(size) is None:
                pools.place(size, pressed=False)
    return pools.reserved


def describe_bytes(categories: dict[str, int]) -> str:
    """Return non-empty categories in words: `"weights 1.00 GiB + gradients 1.00 GiB = 2.00 GiB"`."""
    named = [f"{name} {format_bytes(count)}" for name, count in categories.items() if count]
    return f"{' + '.join(named)} = {format_bytes(sum(categories.values()))}"


def describe_shortage(
    module: torch.nn.Module,
    optimizers: Iterable[Optimizer],
    *,
    budget_bytes: int,
    phase: str,
    reason: str,
    rows: int | None,
    requested: int | None = None,
    positions: Collection[int] = (),
    recomputes: bool = False,
) -> str:
    """Return three lines for an out-of-memory error: the shortage, its context, remedies.

    Args:
        module: Module in training.
        optimizers: Optimizers of the run.
        budget_bytes: Bytes the run may use.
        phase: Phase in which memory ran out: `"weights"`, `"batch"`, `"prepare"`, `"forward"`, `"backward"`, `"optimizer
            step"`, or the name of an evaluation.
        reason: The allocator's own words.
        rows: Rows that ran at once; None for a batch that cannot be split.
        requested: Bytes of the failed allocation, if the allocator stated them.
        positions: Entries of a row of the batch's tensors, such as its number of tokens; they identify logits by their size.
        recomputes: Whether activation checkpointing is on already.
    """
    optimizers = list(optimizers)
    need = static_bytes(module, optimizers)
    what = _what_did_not_fit(module, optimizers, phase=phase, rows=rows, requested=requested, positions=positions)
    left = max(budget_bytes - sum(need.values()), 0)
    does = "does" if what.startswith(("the batch", "the result of prepare", "the optimizer's state")) else "do"
    how = "even with cleared caches" if rows is None else "even with the smallest micro-batch"
    return (
        f"{what} {does} not fit: memory ran out in {phase} {how} ({reason}).\n"
        f"Held before any activation: {describe_bytes(need)}; the budget of {format_bytes(budget_bytes)} leaves {format_bytes(left)}.\n"
        f"What helps: {'' if recomputes else 'memory.recompute=true, '}hardware.precision=bf16-mixed, shorter sequences, a fused optimizer, a smaller model, "
        "or a larger memory.budget if the machine has it."
    )


def _what_did_not_fit(
    module: torch.nn.Module,
    optimizers: list[Optimizer],
    *,
    phase: str,
    rows: int | None,
    requested: int | None,
    positions: Collection[int],
) -> str:
    if phase == "weights":
        return "the weights"
    if phase == "batch":
        return "the batch itself"
    if phase == "prepare":
        return "the result of prepare on the whole batch"
    if phase == "optimizer step":
        has_state = any(optimizer.state for optimizer in optimizers)
        return "the optimizer's temporaries" if has_state else "the optimizer's state, which its first step creates,"
    if phase == "backward" and requested is not None and requested in _gradients(module):
        return "the gradients of the weights"
    if requested is not None and rows is not None and _are_logits(module, requested, rows=rows, positions=positions):
        return f"the logits of {rows} row{'s' * (rows != 1)}"
    if rows is None:
        return "the activations of a batch that cannot be split"
    return f"the activations of {rows} row{'s' * (rows != 1)}"


def _gradients(module: torch.nn.Module) -> set[int]:
    """Return the byte sizes of gradients that do not exist yet."""
    return {
        tensor_bytes(parameter)
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.grad is None
    }


_ROUNDING = 0.005  # allocators name sizes with two decimals


def _are_logits(module: torch.nn.Module, requested: int, *, rows: int, positions: Collection[int]) -> bool:
    """Return whether an allocation has the size of the widest linear layer's output.

    The output is counted at all positions, or at all but one as next-token losses do.
    """
    widest = max((layer.out_features for layer in module.modules() if isinstance(layer, torch.nn.Linear)), default=0)
    counts = {1, *positions, *(count - 1 for count in positions)} - {0}
    sizes = (rows * count * widest * item for count in counts for item in (2, 4))
    return any(abs(requested - size) <= _ROUNDING * size for size in sizes)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of `tensor`; those of its parts if it wraps others, as 8-bit formats do.

    Of a tensor that is divided over ranks, it is the part on this rank.
    """
    if is_traceable_wrapper_subclass(tensor):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return sum(tensor_bytes(part) for part in parts if isinstance(part, torch.Tensor))
    return tensor.numel() * tensor.element_size()


def _optimizer_bytes(optimizer: Optimizer) -> int:
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state:
                total += sum(tensor_bytes(value) for value in state.values() if isinstance(value, torch.Tensor))
            elif parameter.requires_grad:
                total += _states(optimizer, group) * tensor_bytes(parameter)
    return total


def _states(optimizer: Optimizer, group: dict[str, object]) -> int:
    if isinstance(optimizer, torch.optim.SGD):
        return int(bool(group.get("momentum")))
    known = next((count for kind, count in _STATES_PER_PARAMETER.items() if isinstance(optimizer, kind)), 0)
    return known + sum(bool(group.get(option)) for option in ("amsgrad", *_MORE_STATES.get(type(optimizer), ())))
