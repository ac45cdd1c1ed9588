"""The memory that one of several CPU processes takes in a training step under each strategy."""

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, Dataset

from benchmarks.planner.harness.shared_memory import through_file
from benchmarks.planner.zoo.modules import MODULES
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.options import CheckpointedBlocks
from lightning_unified.step.sharding.wrapping import is_sharded, shard
from lightning_unified.strategies import UnifiedDDPStrategy, UnifiedFSDPStrategy

__all__ = ["RankCell", "measured", "peak_of_this_rank"]

_STEPS, _STEADY = 5, 2
_MARK = "steady state begins"
_LIMIT_S = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCell:
    """A module on several ranks.

    Attributes:
        module: The name of a module of the zoo.
        devices: The number of ranks.
        strategy: `"fsdp"` (Lightning's `ModelParallelStrategy`), `"unified_fsdp"` or `"unified_ddp"`.
        hold: As `UnifiedFSDPStrategy` takes it.
        recompute: Whether all blocks recompute their activations.
        optimizer: The optimizer, as the zoo names it.
        precision: Lightning's name.
        rows: Rows of each rank's batch.
    """

    module: str
    devices: int
    strategy: str
    hold: str = "auto"
    recompute: bool = False
    optimizer: str = "adamw foreach"
    precision: str = "32-true"
    rows: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measured(cell: RankCell) -> list[int]:
    """Return the counted peak of each rank, from as many processes.

    Each ends within five minutes.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.planner.several_devices", "--rank-of", json.dumps(cell.to_dict())]
        environ = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NODE_RANK": "0",
            "WORLD_SIZE": str(cell.devices),
            "OMP_NUM_THREADS": "1",
            "RANKS_FOLDER": folder,
        }
        processes = [
            subprocess.Popen(
                command,
                env={**environ, "LOCAL_RANK": str(rank), "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(cell.devices)
        ]
        try:
            ended = [process.communicate(timeout=_LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        failed = next((said for process, (_, said) in zip(processes, ended, strict=True) if process.returncode), None)
        if failed is not None:
            raise RuntimeError(failed[-2000:])
        return [json.loads(said.splitlines()[-1])["peak_bytes"] for said, _ in ended]


def peak_of_this_rank(cell: RankCell, folder: Path) -> int:
    """Return the most bytes that tensors took on this rank in the steady state.

    They are the sum of all that torch's CPU allocator reports to the profiler, in the order of time.
    """
    torch.set_num_threads(1)
    batch = MODULES[cell.module].batch("cpu", cell.rows)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, through_file(folder / "memory"):
        _train(cell, batch)
        gc.collect()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begins = next(event.start_ns() for event in events if event.name() == _MARK)
    now = most = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now) if event.start_ns() >= begins else now
    return most


class _Marks(L.Callback):
    """Puts a mark among the profiler's events where the steady state begins."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == _STEADY:
            with record_function(_MARK):
                pass


class _Made(Dataset):
    """Batches made on request, as a loader's are."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._batch.items()}


def _train(cell: RankCell, batch: Mapping[str, Tensor]) -> None:
    module = MODULES[cell.module].build("cpu", optimizer=cell.optimizer)
    if cell.strategy == "fsdp":
        _shard_itself(module, recompute=cell.recompute)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=cell.devices,
        strategy=_strategy(cell),
        precision=cell.precision,  # type: ignore[arg-type]
        callbacks=[_Marks()],
        max_steps=_STEPS,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(_Made(batch), batch_size=None))


def _strategy(cell: RankCell) -> Strategy:
    if cell.strategy == "fsdp":
        return ModelParallelStrategy(data_parallel_size=cell.devices, tensor_parallel_size=1)
    kinds = {"unified_fsdp": UnifiedFSDPStrategy, "unified_ddp": UnifiedDDPStrategy}
    options: dict[str, Any] = {"hold": cell.hold} if cell.strategy == "unified_fsdp" else {"predict": False}
    return kinds[cell.strategy](
        micro_batch_size=cell.rows, recompute=cell.recompute, budget="90%", check_split=False, **options
    )


def _shard_itself(module: L.LightningModule, *, recompute: bool) -> None:
    """Give a module the `configure_model` that `ModelParallelStrategy` needs."""

    def configure_model(self: L.LightningModule) -> None:
        if is_sharded(self):
            return
        assert self.device_mesh is not None
        shard(self, self.device_mesh["data_parallel"])
        register_fsdp_forward_method(self, "training_step")
        if recompute:
            CheckpointedBlocks(self, RecomputePolicy(blocks="all"))

    module.configure_model = types.MethodType(configure_model, module)  # type: ignore[method-assign]
