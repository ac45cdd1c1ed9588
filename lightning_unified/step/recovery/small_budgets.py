"""Refuse budgets that cannot hold what a run keeps from step to step."""

import math
from collections.abc import Mapping, Sequence

import torch

from lightning_unified.cost_model import describe_bytes, metal_heap_bytes, static_bytes
from lightning_unified.errors import BudgetError
from lightning_unified.hardware import parse_spec
from lightning_unified.step.recovery.budget_watch import BudgetWatch
from lightning_unified.units import MIB, format_bytes

__all__ = ["refuse_budget_below_process", "refuse_small_budget"]

_GROWTH = 1.05  # judgement: code that a first step loads, as a share of the process before it


def refuse_small_budget(
    watch: BudgetWatch, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Raise `BudgetError` if the budget cannot hold weights, gradients and optimizer state.

    Activations are not counted.

    Nothing is refused before the budget is resolved. `optimizers` is empty before they exist.
    """
    need, budget = static_bytes(module, optimizers), watch.budget
    if budget is None:
        return
    given = f"a budget of {format_bytes(budget.bytes)} ({budget.spec}) cannot hold {type(module).__name__}"
    if sum(need.values()) > budget.bytes:
        raise BudgetError(
            f"{given}: {describe_bytes(need)}, before any activation. Give a budget well above "
            f"{format_bytes(max(sum(need.values()), _least_on_cpu(watch, need)))}, or train a smaller model."
        )
    heaps = metal_heap_bytes(module, settings=watch.allocator) if watch.device.type == "mps" else 0
    if heaps > budget.bytes:
        raise BudgetError(
            f"{given}: Metal keeps its weights of {format_bytes(need['weights'])} in heaps of {format_bytes(heaps)} together, one of 1 GiB "
            f"for tensors of 10 MiB and more. Give a budget well above {format_bytes(heaps)}, or train a smaller model."
        )


def refuse_budget_below_process(
    watch: BudgetWatch, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Raise `BudgetError` if a CPU's process already exceeds a stated budget.

    No step could keep such a budget.

    Budgets that follow the machine (`auto`, `leave`) are not refused.
    """
    budget, held = watch.budget, watch.reading().allocated
    if budget is None or not watch.counts_process or parse_spec(budget.spec).kind in ("auto", "leave"):
        return
    if held.bytes is None or held.bytes <= budget.bytes:
        return
    least = _least_on_cpu(watch, static_bytes(module, optimizers))
    raise BudgetError(
        f"a budget of {format_bytes(budget.bytes)} ({budget.spec}) is too small: on a CPU it counts the whole process, and this process holds "
        f"{format_bytes(held.bytes)} before its first step ({held.source}: Python, libraries, data and weights). Give {_up_to_16_mib(least)} or "
        f"more, for {type(module).__name__} without its activations, or budget=auto."
    )


def _least_on_cpu(watch: BudgetWatch, need: Mapping[str, int]) -> int:
    """Return the bytes that a CPU's process holds with gradients and optimizer state.

    The result is 0 where the budget counts tensors only.
    """
    if not watch.counts_process:
        return 0
    return math.ceil(_GROWTH * (watch.reading().allocated.bytes or 0)) + need["gradients"] + need["optimizer state"]


def _up_to_16_mib(count: int) -> str:
    return f"{math.ceil(count / (16 * MIB)) * 16}MiB"
