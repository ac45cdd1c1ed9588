"""Hand-made traces: operations and bytes per row and fixed, split like the real step."""

from dataclasses import dataclass, field

from lightning_unified.cost_model.candidates import Taken
from lightning_unified.cost_model.rates import Rates
from lightning_unified.cost_model.trace.trace import Give, Take, Trace, Work


def rates(*, flops=1e12, bandwidth=1e11, launch=1e-5, kernel=2e-6, part=0.0):
    return Rates(
        name="a machine",
        flops={"float32": flops},
        bandwidth=bandwidth,
        launch=launch,
        kernel=kernel,
        part=part,
        sources={},
    )


@dataclass
class MadeTraces:
    """A step whose operations are all affine in the rows, as in a real step.

    `works` are (flops fixed, flops a row, bytes fixed, bytes a row), run in the forward and in the backward pass.
    """

    fixed: int = 1000
    per_row: int = 100
    works: tuple = ((0, 10**9, 0, 10**6),)
    optimizer: tuple = (0, 10**8)
    backend: str = "cuda"
    length: int | None = None
    batch_row: int = 0
    asked: list = field(default_factory=list)

    def at(self, rows, *, num_micro_batches=1):
        self.asked.append((rows, num_micro_batches))
        events = [Take(0, self.fixed, "weights"), Take(10**6, self.batch_row * rows * num_micro_batches, "batch")]
        for part in range(num_micro_batches):
            for phase in ("forward", "backward"):
                events += [
                    Work("mm", phase, flops=f + fr * rows, moved=b + br * rows, dtype="float32")
                    for f, fr, b, br in self.works
                ]
            events += [Take(part + 1, self.per_row * rows, "activations"), Give(part + 1)]
            if part:
                events.append(Work("add_", "backward", moved=3 * self.fixed))
        events.append(Work("adam", "optimizer step", flops=self.optimizer[0], moved=self.optimizer[1]))
        return Trace(
            events=tuple(events),
            rows=rows,
            num_micro_batches=num_micro_batches,
            backend=self.backend,
            length=self.length,
        )

    def peak_bytes(self, rows, *, num_micro_batches=1):
        return self.fixed + self.batch_row * rows * num_micro_batches + self.per_row * rows


def taken(trace, *, times=1.0):
    """Return the bytes of the made step; an allocator reserves `times` its peak."""
    most = live_peak(trace)
    return Taken(peak_bytes=most, reserved_bytes=int(times * most))


def live_peak(trace):
    """Return the peak bytes of the made step, without an allocator."""
    live = most = 0
    sizes = {}
    for event in trace.events:
        if isinstance(event, Take):
            sizes[event.storage] = event.bytes
            live += event.bytes
        elif isinstance(event, Give):
            live -= sizes[event.storage]
        most = max(most, live)
    return most
