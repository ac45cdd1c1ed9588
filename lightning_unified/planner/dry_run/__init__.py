"""Dry run: execute one real training step on fake tensors, and record its allocations.

A fake tensor has a shape, a dtype and a device, but no storage (`torch._subclasses.FakeTensorMode`). Operations on fake tensors compute
shapes only. So a step of any size runs in a second or two, without a GPU and without memory for weights or activations.

How a dry run works:

1. `fake.fake_copy` copies the module: each tensor becomes a fake tensor, and all Python objects are the real ones.
2. `fake_batch.Template` makes a fake batch of any number of rows from a real batch. Small integer tensors keep their values.
3. `trainer.DryRunTrainer` fits the copy with Lightning's own loops and this package's own step (`strategy.DryRunStrategy`). Nothing
   writes files, handles signals or touches a device.
4. A first step runs so that optimizer state and gradients exist. The second step is recorded (`recording.RecordingCallback`), because all
   later steps are like it.
5. `fake.recorder.Recorder` sees each operation, and follows each storage from its allocation to the moment when its last reference ends.
   Allocations that only another backend's kernels make are added by `cost_model.backends`.
6. The result is a `Trace`: the operations, allocations and frees of the step in their order.

A step may read values, as in `loss.item()`. `fake.known_values.Answers` returns known values where it can, else a made-up value, and notes
the read. A made-up value that can decide a shape lowers the confidence of the trace.

`isolation.untouched` keeps generators, loggers and standard output as they are. `step.undo.StateWatch` puts back Python state that the copy
shares with the module.
"""

from lightning_unified.planner.dry_run.dry_run import DryRun, DryRuns, watch_of
from lightning_unified.planner.dry_run.spec import StepSpec

__all__ = ["DryRun", "DryRuns", "StepSpec", "watch_of"]
