"""Handmade steps: a small network of blocks whose storages grow with rows and length."""

import pytest

from lightning_unified.cost_model.trace.trace import Give, Take, Trace, Work


class Step:
    """Writes a trace event by event."""

    def __init__(self):
        self.events = []
        self.taken = 0

    def work(self, op, phase, place="", *, flops=0, moved=0):
        self.events.append(Work(op, phase, place, flops, moved, "float32"))

    def take(self, size, category):
        self.taken += 1
        self.events.append(Take(self.taken * 7, size, category))  # numbers of their own, as a recorder's
        return self.taken * 7

    def give(self, *storages):
        self.events += [Give(storage) for storage in storages]


def made_step(*, rows, length=16, num_micro_batches=1, blocks=3, width=64, backend="cuda", quadratic=True, scale=64):
    """Return a steady-state step of `blocks` attention blocks, split into so many micro-batches.

    The attention scores are materialised.
    """
    step, unit = Step(), width * scale
    step.work("", "setup")
    weights = [step.take(unit * width, "weights") for _ in range(blocks)]
    old = [step.take(unit * width, "gradients") for _ in weights]
    for _ in weights:
        step.take(2 * unit * width, "optimizer state")
    step.work("batch", "batch")
    batch = step.take(rows * num_micro_batches * length * 8, "batch")
    outputs, grads = [], []
    for part in range(num_micro_batches):
        saved = []
        for block in range(blocks):
            place = f"blocks.{block}.attention"
            step.work(
                "aten.mm.default", "forward", place, flops=2 * rows * length * unit, moved=rows * length * 8 + unit
            )
            saved.append(step.take(rows * length * unit, "activations"))
            scratch = step.take(rows * length * unit + 640, "temporaries")
            if quadratic:
                step.work("aten.bmm.default", "forward", place, flops=rows * length**2 * unit)
                saved.append(step.take(rows * length**2 * scale, "activations"))
            step.give(scratch)
        step.work("aten.cross_entropy.default", "forward", "head")
        logits = step.take(rows * length * 1000, "logits")
        outputs.append(step.take(rows * 4, "temporaries"))
        if part == 0:
            step.give(*old)
        for block in reversed(range(blocks)):
            step.work("aten.mm.default", "backward", f"blocks.{block}.attention", flops=4 * rows * length * unit)
            inner = step.take(rows * length * unit, "temporaries")
            grad = step.take(unit * width, "gradients")
            if part == 0:
                grads.append(grad)
            else:
                step.give(grad)
            step.give(saved.pop(), inner)
        step.give(logits, *saved)
    if num_micro_batches > 1:
        step.work("aten.cat.default", "callbacks")
        joined = step.take(rows * num_micro_batches * 4, "callbacks")
        for _ in outputs:
            step.work("aten.mul.Tensor", "optimizer step")
            step.give(step.take(rows * 4, "temporaries"))
            step.work("aten.add_.Tensor", "optimizer step")
        step.give(*outputs, joined)
    else:
        step.give(*outputs)
    step.work("aten._fused_adamw_.default", "optimizer step", "", moved=7 * blocks * unit * width)
    scratch = step.take(unit, "temporaries")
    step.give(scratch, batch)
    return Trace(
        events=tuple(step.events), rows=rows, length=length, num_micro_batches=num_micro_batches, backend=backend
    )


@pytest.fixture(scope="session")
def made():
    return made_step
