"""Compare the backward passes of a loss and of half of it: a factor of the loss weights a micro-batch.

Most backward passes are. A gradient hook may add a number (`gradient + decay * weight`), a function of autograd may return a gradient of its
own, such as that of an auxiliary loss, and either may keep gradients or log their norm.
"""

from lightning_unified.step.exactness.gradients import disagreement
from lightning_unified.step.exactness.trials.comparison import Comparison
from lightning_unified.step.exactness.trials.learning import differing, differing_logs
from lightning_unified.step.exactness.trials.run import Run
from lightning_unified.step.results.state.writes import Written

__all__ = ["is_proportional"]

_FACTOR = 0.5  # a power of two, so that it adds no rounding


def is_proportional(comparison: Comparison) -> bool:
    """Return whether a factor of the loss changes a backward pass by that factor only.

    What the pass writes and logs must stay the same. The smallest micro-batch with a gradient runs once more, with half its loss in the
    backward pass.
    """
    split = comparison.split
    sizes = [(size, index) for index, size in enumerate(split.sizes) if not split.runs[index].gradient.says_nothing]
    if not sizes or split.scaled is None:
        return True
    index = min(sizes)[1]
    run, half = split.runs[index], split.scaled(index, _FACTOR)
    if disagreement(run.gradient, [(half.gradient, 1.0)], comparison.tolerance).excess > 1:
        return False
    return not differing(_of_backward(run), _of_backward(half)) and not differing_logs(run.logs, half.logs)


def _of_backward(run: Run) -> Written:
    return {path: one for path, one in run.written.items() if one.in_backward}
