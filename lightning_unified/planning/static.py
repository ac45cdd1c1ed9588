"""What a run needs before any activation: weights, gradients, optimizer state and buffers, in bytes."""

from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from lightning_unified.units import format_bytes

__all__ = ["describe_bytes", "describe_shortage", "static_bytes"]

# State tensors as large as the parameter, by the base class they come from (torch/optim/*.py). SGD's is counted by its momentum.
_STATES_PER_PARAMETER: dict[type[Optimizer], int] = {
    torch.optim.Adam: 2,
    torch.optim.AdamW: 2,
    torch.optim.NAdam: 2,
    torch.optim.RAdam: 2,
    torch.optim.Adamax: 2,
    torch.optim.Adagrad: 1,
    torch.optim.RMSprop: 1,
    torch.optim.Rprop: 2,
    torch.optim.ASGD: 1,
}


def static_bytes(module: torch.nn.Module, optimizers: Iterable[Optimizer] = ()) -> dict[str, int]:
    """Return bytes by category, each parameter once however often it is shared.

    Args:
        module: With its parameters in their final dtype; they may be on the meta device.
        optimizers: Those of the run. State that exists is counted as it is, state that does not yet by the optimizer's kind;
            an optimizer of unknown kind counts 0 before its first step.
    """
    parameters = list(module.parameters())
    return {
        "weights": sum(_bytes(parameter) for parameter in parameters),
        "gradients": sum(_bytes(parameter) for parameter in parameters if parameter.requires_grad),
        "optimizer state": sum(_optimizer_bytes(optimizer) for optimizer in optimizers),
        "buffers": sum(_bytes(buffer) for buffer in module.buffers()),
    }


def describe_bytes(categories: dict[str, int]) -> str:
    """Return categories for people, the empty ones left out: `"weights 1.00 GiB + gradients 1.00 GiB = 2.00 GiB"`."""
    named = [f"{name} {format_bytes(count)}" for name, count in categories.items() if count]
    return f"{' + '.join(named)} = {format_bytes(sum(categories.values()))}"


def describe_shortage(need: dict[str, int], *, budget_bytes: int, phase: str, reason: str, rows: int | None) -> str:
    """Return in three lines what did not fit, beside what, and what would help.

    Args:
        need: Bytes by category that are held before any activation.
        budget_bytes: What the run may use.
        phase: Where memory ran out: `"forward"`, `"backward"` or `"optimizer step"`.
        reason: The allocator's own words.
        rows: Rows that ran at once; None for a batch that cannot be cut.
    """
    if phase == "optimizer step":
        what = "the optimizer's temporaries"
    elif rows is None:
        what = "the activations of a batch that cannot be cut"
    else:
        what = f"the activations of {rows} row{'s' * (rows != 1)}"
    left = max(budget_bytes - sum(need.values()), 0)
    return (
        f"{what} do not fit: memory ran out in {phase} with the smallest micro-batch there is ({reason}).\n"
        f"Held before any activation: {describe_bytes(need)}; the budget of {format_bytes(budget_bytes)} leaves {format_bytes(left)}.\n"
        "What helps: memory.recompute=true, hardware.precision=bf16-mixed, shorter sequences, a fused optimizer, a smaller model, "
        "or a larger memory.budget if the machine has it."
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _optimizer_bytes(optimizer: Optimizer) -> int:
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state:
                total += sum(_bytes(value) for value in state.values() if isinstance(value, torch.Tensor))
            elif parameter.requires_grad:
                total += _states(optimizer, group) * _bytes(parameter)
    return total


def _states(optimizer: Optimizer, group: dict[str, object]) -> int:
    if isinstance(optimizer, torch.optim.SGD):
        return int(bool(group.get("momentum")))
    known = next((count for kind, count in _STATES_PER_PARAMETER.items() if isinstance(optimizer, kind)), 0)
    return known + int(bool(group.get("amsgrad")))
