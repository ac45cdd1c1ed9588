"""Runs of several ranks that plan their steps."""

import os
from typing import Any

from lightning_unified import UnifiedDDPStrategy
from lightning_unified.cost_model.rates import Rates
from lightning_unified.errors import DryRunError, LightningUnifiedError
from lightning_unified.hardware.allocators.settings import AllocatorSettings
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planner.dry_run import StepSpec
from lightning_unified.planner.first_batch.distributed import DistributedFirstStep, DistributedPlanning
from lightning_unified.planner.first_batch.gather import RunSpeeds
from lightning_unified.planner.first_batch.planning import StepPlanning
from lightning_unified.planner.first_batch.step_budget import StepBudget
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.planner import Planner
from lightning_unified.planner.search.step_traces import CountedMemory, StepTraces
from tests.support.ranks.modules import Blocks, rank
from tests.support.ranks.runs import GIB, MIB, fit, net

MAPPED = 64 * 2**10  # bytes from which the heap that is planned for maps a tensor by itself
SPEEDS = {"flops": {"float32": 1e12}, "bandwidth": 1e11, "launch": 1e-6, "kernel": 1e-6, "part": 1.0}
RATES = Rates(name="made up", **SPEEDS, sources=dict.fromkeys(SPEEDS, "a test"))


def planned() -> dict[str, Any]:
    """Return fits in which the ranks have different budgets.

    A budget is larger than needed, so small that one rank must recompute, or too small on one rank.
    """
    for_certain()
    short = _short()
    found: dict[str, Any] = {"enough": _planned(GIB), "one is short": _planned((GIB, short)[rank()]), "short": short}
    try:
        _planned((GIB, 100_000)[rank()])
    except LightningUnifiedError as error:
        found["refused"] = f"{type(error).__name__}: {error}"
    return found


def partly_planned() -> dict[str, Any]:
    """Return a fit in which one rank cannot trace its step."""
    for_certain()
    plan = DistributedPlanning.plan
    DistributedPlanning.plan = lambda self, *args: plan(self, *args) if rank() == 0 else _untraced()
    return _planned(_short())


def _short() -> int:
    """Return a budget for half a batch with everything recomputed.

    A whole batch does not fit even with everything recomputed. Half a batch does not fit without recomputation.
    """
    module = net(Blocks)
    batch = next(iter(module.train_dataloader()))
    counted = CountedMemory(reduction_bytes=MIB, allocator=AllocatorSettings(mmap_threshold=MAPPED))
    planner = Planner(StepTraces(StepSpec(module=module, batch=batch), counted=counted))

    def needed(blocks: Any, rows: int) -> int:
        combination = Combination(precision="64-true", recompute=RecomputePolicy(blocks=blocks))
        return planner.predict(combination, micro_batch_size=rows).reserved_bytes

    rows = len(batch)
    fits, too_much = needed("all", rows // 2), min(needed(0, rows // 2), needed("all", rows))
    assert too_much > 1.2 * fits, "nothing to choose between: the module's activations must outweigh all else"
    return (fits + too_much) // 2


def for_certain() -> None:
    """Plan at any budget, at speeds that make micro-batches dearer than any recomputation.

    The planned heap maps each large tensor separately. With glibc's default, holes between tensors would decide whether a step
    fits. These holes change with every byte that a step allocates.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MAPPED)
    DistributedFirstStep._is_worth_it = lambda *_: True
    RunSpeeds.rates = RATES
    compared = StepPlanning.combinations
    StepPlanning.combinations = lambda self: compared(self)[:2]  # nothing and everything recomputed


def _planned(left: int) -> dict[str, Any]:
    StepBudget.left = property(lambda _: left)
    strategy = UnifiedDDPStrategy()
    done = fit(net(Blocks), strategy, use_distributed_sampler=False)
    return {**done, "plan": strategy.plan}


def _untraced() -> None:
    raise DryRunError("a test")
