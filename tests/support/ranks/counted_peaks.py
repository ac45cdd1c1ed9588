"""The memory that a rank of FSDP2 takes on the CPU, as torch's allocator reports it."""

import os

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.support.modules.ranked_blocks import ROWS, WIDTH, Net

STEPS = 3


def join(size):
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=size)


def counted_peak(size, path, rows=ROWS, compiles=False):
    """Train as FSDP2 and Lightning do, on this rank, and return the most bytes of the last step.

    With `compiles`, the blocks run as compiled code.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    from benchmarks.planner.harness.shared_memory import through_file
    from lightning_unified.options import Compilation
    from lightning_unified.step.sharding.wrapping import shard

    join(size)
    try:
        with through_file(path), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            module = Net()
            shard(module, dist.init_device_mesh("cpu", (dist.get_world_size(),)))
            register_fsdp_forward_method(module, "training_step")
            Compilation("blocks" if compiles else False).begin(module)
            optimizer = module.configure_optimizers()
            for _ in range(STEPS):
                batch = torch.zeros(rows, WIDTH)
                with torch.profiler.record_function("a step begins"):
                    pass
                loss = module.training_step(batch, 0)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    finally:
        dist.destroy_process_group()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begins = max(event.start_ns() for event in events if event.name() == "a step begins")
    now = most = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now) if event.start_ns() >= begins else now
    return most
