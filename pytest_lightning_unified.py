"""The pytest plugin of lightning-unified: the fixture `memory_budget`.

It fails a test whose module needs too much memory.

    def test_fits(memory_budget):
        with memory_budget("12GiB", device="m2-16gb"):
            ...

pytest loads this module in every session of an environment that has the package. It stands beside the package because importing any
module of `lightning_unified` registers its strategies. A test that forgot `import lightning_unified` would then pass where its script fails.
For the same reason it imports torch and the package inside functions only.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lightning_unified.hardware.simulated import SimulatedAllocator

__all__ = ["MemoryUsed", "budgeted", "memory_budget"]


class MemoryUsed:
    """Memory used by the block so far. Amounts are bytes.

    Attributes:
        budget_bytes: Bytes the block may use.
    """

    def __init__(self, allocator: "SimulatedAllocator", budget_bytes: int) -> None:
        self._allocator = allocator
        self.budget_bytes = budget_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak of live bytes: weights, gradients, optimizer state and activations.

        Each tensor is rounded as the device rounds it.
        """
        return self._allocator.peak

    @property
    def bytes(self) -> int:
        """Live bytes now."""
        return self._allocator.allocated


@contextmanager
def budgeted(budget: str | int, *, device: str, holding: "Iterable[nn.Module | Tensor]" = ()) -> Iterator[MemoryUsed]:
    """Run the block on the CPU, count memory as on the simulated `device`, and fail above `budget`.

    The device's own limits are not applied, so the failure can state the full need.

    Args:
        budget: As a strategy takes it: `"12GiB"`, `"60%"` of the device's pool, `"auto"`.
        device: A simulated machine, as in `"m2-16gb"`.
        holding: Modules and tensors on the device when the block begins. Weights count from their first use in any case.

    Raises:
        BudgetError: If the device has less memory.
        HardwareError: If no machine has that name.
    """
    import torch

    from lightning_unified.cost_model.backends import hidden_bytes
    from lightning_unified.hardware import resolve_budget
    from lightning_unified.hardware.simulated import SimulatedMachine
    from lightning_unified.units import format_bytes

    machine = SimulatedMachine(device, bounded=False)
    allowed = resolve_budget(budget, machine.reading())
    held = [tensor for each in holding for tensor in ([each] if isinstance(each, torch.Tensor) else _tensors_of(each))]
    used = MemoryUsed(machine.allocator, allowed.bytes)
    with machine.active(holding=held, kernels=hidden_bytes) as live:
        yield used
    if live.elsewhere:
        pytest.fail(
            f"memory_budget: the block also ran on {', '.join(sorted(live.elsewhere))}, where nothing is counted; run it on the CPU, as with "
            'Trainer(accelerator="cpu").',
            pytrace=False,
        )
    if used.peak_bytes > allowed.bytes:
        pytest.fail(
            f"memory_budget: the block needs {format_bytes(used.peak_bytes)} on a simulated {machine.profile.name}, which is "
            f"{format_bytes(used.peak_bytes - allowed.bytes)} above its budget of {format_bytes(allowed.bytes)} ({allowed.spec}).\n"
            f"The peak was in {live.peak_place}.",
            pytrace=False,
        )


@pytest.fixture
def memory_budget() -> Callable[..., AbstractContextManager[MemoryUsed]]:
    """Return `memory_budget(budget, *, device, holding=())`, the context manager `budgeted`."""
    return budgeted


def _tensors_of(module: "nn.Module") -> "list[Tensor]":
    return [*module.parameters(), *module.buffers()]
