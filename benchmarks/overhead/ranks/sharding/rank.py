"""Train as one rank of a side, and count its time and memory."""

import contextlib
import json
import os
import platform
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from benchmarks.overhead.ranks.sharding import WARM
from benchmarks.overhead.ranks.sharding.decoder import Decoder, adamw
from benchmarks.records import prepare
from lightning_unified import UnifiedFSDPStrategy

__all__ = ["run_rank"]

MIB = 2**20


class Module(L.LightningModule):
    """The decoder for Lightning; `recompute` is the attribute that the strategy would set."""

    def __init__(self, work: dict[str, Any]) -> None:
        super().__init__()
        self.work, self.recompute = work, True
        self.net = Decoder(work["case"])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(*batch, recompute=self.recompute)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self, self.work["accelerator"])


class Sharded(Module):
    """The same, sharded in `configure_model` as `ModelParallelStrategy` needs it."""

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):  # it may be called again
            assert self.device_mesh is not None
            self.net.shard(self.device_mesh["data_parallel"])


class Clock(L.Callback):
    """Counts time and memory of each step, without waiting for the device.

    A step begins when its batch is on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.held, self.began = device, 0, time.perf_counter()
        self.marks: list[list[Any]] = []
        self.loss: Tensor | None = None

    def begin(self) -> None:
        """Begin a step; the first one resets the peaks."""
        if not self.marks:
            self.began = time.perf_counter() - self.began
            self.wait()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
        self.marks.append([self._now()])

    def end(self, loss: Tensor) -> None:
        """End a step."""
        self.marks[-1].append(self._now())
        self.loss = loss

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.begin()

    def on_train_batch_end(self, trainer, pl_module, outputs: Any, batch, batch_idx):
        self.end(outputs["loss"])

    def found(self) -> dict[str, Any]:
        """Return milliseconds of the counted steps and from one to the next, and peaks in bytes."""
        self.wait()
        steps = [_ms(begin, end) for begin, end in self.marks[WARM:]]
        cycles = [_ms(one[0], two[0]) for one, two in zip(self.marks[WARM:], self.marks[WARM + 1 :], strict=False)]
        if self.device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self.device)
            reserved: int | None = torch.cuda.max_memory_reserved(self.device)
        else:
            allocated, reserved = _status("VmHWM") - self.held, None
        return {
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine(),
            "steps": len(self.marks), "steps_ms": steps, "cycles_ms": cycles,
            "allocated": allocated, "reserved": reserved, "setup_s": round(self.began, 1),
            "loss": None if self.loss is None else round(float(self.loss), 4),
        }  # fmt: skip


def _ms(begin: Any, end: Any) -> float:
    return 1e3 * (end - begin) if isinstance(begin, float) else begin.elapsed_time(end)


def _status(field: str) -> int:
    """Return a field of this process's status in bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(text.split(f"{field}:")[1].split()[0])


def batches(work: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    case, generator = work["case"], torch.Generator().manual_seed(work["rank"])
    shape = (case["rows"], case["length"] + 1)
    drawn = [torch.randint(case["vocabulary"], shape, generator=generator) for _ in range(4)]
    pairs = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in drawn]
    if work["accelerator"] == "cuda":
        pairs = [(tokens.pin_memory(), labels.pin_memory()) for tokens, labels in pairs]
    return [pairs[number % 4] for number in range(work["steps"])]


def train_bare(work: dict[str, Any], clock: Clock) -> None:
    accelerator, device, mixed = work["accelerator"], clock.device, work["case"]["precision"] == "bf16-mixed"
    backend = "nccl" if accelerator == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=work["limit_s"]))
    net = Decoder(work["case"])
    net.shard(init_device_mesh(accelerator, (work["ranks"],)))
    net.to_empty(device=device)
    for module in net.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    optimizer = adamw(net, accelerator)
    for batch in batches(work):
        tokens, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
        clock.begin()
        with torch.autocast(accelerator, torch.bfloat16, enabled=mixed):
            loss = net(tokens, labels, recompute=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.end(loss.detach())


def train_lightning(work: dict[str, Any], clock: Clock, budget: int | str) -> dict[str, Any]:
    ours = work["kind"] == "ours"
    plain = ModelParallelStrategy(data_parallel_size=work["ranks"], tensor_parallel_size=1)
    trainer = L.Trainer(
        accelerator=work["accelerator"],
        devices=work["ranks"],
        strategy=plain if not ours else UnifiedFSDPStrategy(
            hold=work["hold"], budget=budget, check_split=False, optimizer_rollback=work["rollback"],
            timeout=timedelta(seconds=work["limit_s"]),
        ),
        precision=work["case"]["precision"],
        max_steps=work["steps"],
        callbacks=[clock],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    loader: Any = torch.utils.data.DataLoader(batches(work), batch_size=None)  # pyright: ignore[reportArgumentType]  # a list
    trainer.fit(Module(work) if ours else Sharded(work), loader)
    strategy = trainer.strategy
    if not isinstance(strategy, UnifiedFSDPStrategy):
        return {}
    plan, micro, rows = strategy.plan, strategy.micro_batch_size, work["case"]["rows"]
    return {
        "holds": strategy.holds,
        "micro_batch_size": micro,
        "micro_batches": -(-rows // micro) if micro else None,
        "predicted": plan.predicted_peak_bytes,
        "recompute": plan.recompute,
        "budget": plan.budget_bytes,
        "recoveries": strategy.recoveries,
        "events": strategy.events,
        "reasons": {key: plan.reasons.get(key) for key in ("prediction", "micro_batch_size", "cap")},
    }


def run_rank(work: dict[str, Any]) -> None:
    """Train as one rank of a side, once the driver says so; write the result to a file and end."""
    prepare("sharded-ranks")
    folder, rank, accelerator = Path(work["folder"]), work["rank"], work["accelerator"]
    (folder / f"{work['name']}-{rank}.ready").touch()
    line = sys.stdin.readline()
    if not line:
        return  # the driver is gone
    told = json.loads(line)
    work |= told
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(work["ranks"]), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(told["port"]),
    )  # fmt: skip
    device = torch.device(accelerator, rank) if accelerator == "cuda" else torch.device("cpu")
    clock, budget = Clock(device), "auto"
    try:
        if accelerator == "cuda":
            torch.cuda.set_device(device)
        else:
            clock.held = _status("VmRSS")
        if told["cap"] is not None:
            budget = _cap(device, told["cap"], ranks=work["ranks"])
        torch.manual_seed(0)
        if work["kind"] == "bare":
            train_bare(work, clock)
            found = clock.found()
        else:
            found = train_lightning(work, clock, budget) | clock.found()
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:1500], "steps": len(clock.marks)}
        with contextlib.suppress(Exception):
            found |= {key: value for key, value in clock.found().items() if key in {"device", "allocated", "reserved"}}
    target = folder / f"{work['name']}-{rank}.json"
    target.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
    target.with_suffix(".part").replace(target)
    if "error" not in found:
        with contextlib.suppress(Exception):
            dist.barrier()
    os._exit(int("error" in found))  # a group that another rank has left may not end by itself


def _cap(device: torch.device, cap: int, *, ranks: int) -> int:
    """Let tensors take `cap` bytes at most; return the budget that says so to the strategy.

    On a CPU the budget is of whole processes, and of all ranks together.
    """
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(device).total_memory, device)
        return cap
    most = _status("VmData") + cap + 64 * MIB  # with stacks of threads
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return ranks * (_status("VmRSS") + cap)


if __name__ == "__main__":
    run_rank(json.loads(sys.argv[1]))
