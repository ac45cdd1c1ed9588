"""Fits of sharded ranks whose blocks are compiled."""

from typing import Any
from unittest import mock

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from lightning_unified import UnifiedFSDPStrategy
from lightning_unified.nn.compiled import compiled_parts
from tests.support.ranks.planned_runs import for_certain
from tests.support.ranks.shard_faults import Fails, local_rank
from tests.support.ranks.sharded import FEW, Deep, trained

SETTINGS: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 1}
ROWS = {"planned": 12, "split": FEW, "failing": FEW}  # a fault comes in the third batch of eight rows


class CompiledByUser(Deep):
    """Its blocks are compiled before they are sharded."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for block in self.blocks:
            block.compile(backend="aot_eager")


class Latest(Deep):
    latest: "Latest"

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        Latest.latest = self


def fits(hold: Any, *names: str) -> dict[str, dict[str, Any]]:
    """Return fits with `compile="blocks"`, by name.

    Each has the number of graphs, the graph breaks, and the parts that are still compiled after the fit.
    """
    for_certain()
    return {name: _fit(hold, name) for name in names}


def _fit(hold: Any, name: str) -> dict[str, Any]:
    torch.compiler.reset()
    counters.clear()
    graphs = CompileCounterWithBackend("aot_eager")
    options: dict[str, Any] = {
        "split": {"micro_batch_size": 2, "recompute": True, "predict": False},
        "failing": {"predict": False},
    }.get(name, {})
    strategy = UnifiedFSDPStrategy(hold=hold, compile="blocks", **options)
    events = [Fails("backward")] if name == "failing" else []
    with mock.patch("lightning_unified.options.compilation.Compiler", return_value=graphs):
        fit = trained(
            strategy, *events, ranks=2, rank=local_rank(), kind=Latest, module={"rows": ROWS[name]}, **SETTINGS
        )
    fit |= {"graphs": graphs.frame_count, "breaks": dict(counters["graph_break"])}
    return {**fit, "plan": strategy.plan, "left": list(compiled_parts(Latest.latest))}


def by_user(hold: Any) -> dict[str, Any]:
    for_certain()
    strategy = UnifiedFSDPStrategy(hold=hold)
    fit = trained(strategy, ranks=2, rank=local_rank(), kind=CompiledByUser, module={"rows": FEW}, **SETTINGS)
    return {**fit, "plan": strategy.plan}


def whole() -> Any:
    return trained(UnifiedFSDPStrategy(compile="whole"), ranks=2, rank=local_rank(), max_epochs=1)
