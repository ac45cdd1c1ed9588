"""The live bytes of a real fit's second step, from the profiler.

Tests compare the result of a dry run with them.
"""

import gc

import lightning as L
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_unified.strategies import UnifiedStrategy


class Loader:
    """Gives the same batch again and again, each time in new tensors.

    A mark in the profile shows where each batch begins.
    """

    def __init__(self, batch, count):
        self.batch, self.count = batch, count

    def __len__(self):
        return self.count

    def __iter__(self):
        for index in range(self.count):
            with record_function(f"batch {index}"):
                pass
            yield apply_to_collection(self.batch, torch.Tensor, torch.clone)


def live_peak(make, batch, *, num_micro_batches=1, rows=None, steps=2, folder, setup=None, **settings):
    """Return the most live bytes in the last of `steps` batches, weights included.

    The tensors in `batch` do not count.
    """
    gc.collect()  # so that the profiler sees only frees of its own allocations
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module = make()
        if setup is not None:
            setup(module)
        strategy = UnifiedStrategy(
            micro_batch_size="auto" if num_micro_batches == 1 else rows,
            check_split=False,
            batch_norm="micro",
            recompute=settings.pop("recompute", "auto"),
        )
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **settings,
        )
        trainer.fit(module, Loader(batch, steps))
    events = profiler.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == f"batch {steps - 1}")
    total = peak = 0
    for event in sorted((one for one in events if one.name() == "[memory]"), key=lambda one: one.start_ns()):
        total += event.nbytes()
        if event.start_ns() >= begin:
            peak = max(peak, total)
    return peak


def peak_of(trace):
    """Return the most bytes that are live at once in a trace."""
    sizes, total, peak = {}, 0, 0
    for event in trace.events:
        if hasattr(event, "category"):
            sizes[event.storage] = event.bytes
            total += event.bytes
            peak = max(peak, total)
        elif hasattr(event, "storage"):
            total -= sizes.pop(event.storage)
    return peak
