"""Compare the backward passes of a loss and of half of it: a factor of the loss weights a micro-batch.

Most backward passes are. A gradient hook may add a number (`gradient + decay * weight`), a function of autograd may return a gradient of its
own, such as that of an auxiliary loss, and either may keep gradients or log their norm.
"""

from collections.abc import Callable, Hashable

from lightning_unified.step.exactness.gradients import disagreement
from lightning_unified.step.exactness.trials.comparison import Comparison
from lightning_unified.step.exactness.trials.learning import differing, differing_logs
from lightning_unified.step.exactness.trials.run import Run
from lightning_unified.step.results.state.writes import Written

__all__ = ["is_proportional"]

_FACTOR = 0.5  # a power of two, so that it adds no rounding


def is_proportional(comparison: Comparison, *, anywhere: Callable[[bool], bool]) -> bool:
    """Return whether a factor of the loss changes a backward pass by that factor only.

    What the pass writes and logs must stay the same. The smallest micro-batch with a gradient runs once more, with half its loss in the
    backward pass.

    Args:
        comparison: The runs of a trial.
        anywhere: Returns whether something holds in any process of the group; they run the same passes.
    """
    split = comparison.split
    sizes = [(size, index) for index, size in enumerate(split.sizes) if not split.runs[index].gradient.says_nothing]
    if anywhere(not sizes) or split.scaled is None:
        return True
    index = min(sizes)[1]
    run, half = split.runs[index], split.scaled(index, _FACTOR)
    is_scaled = disagreement(run.gradient, [(half.gradient, 1.0)], comparison.tolerance).excess <= 1
    changed = _changed(run, half)
    if not anywhere(bool(changed)):
        return is_scaled
    again = split.scaled(index, 1.0)  # equal runs too may write and log other values, such as times
    return is_scaled and changed <= _changed(run, again)


def _changed(run: Run, other: Run) -> set[Hashable]:
    """Return the paths of state that two backward passes wrote differently, and the names of logs that differ."""
    return {*differing(_of_backward(run), _of_backward(other)), *differing_logs(run.logs, other.logs)}


def _of_backward(run: Run) -> Written:
    return {path: one for path, one in run.written.items() if one.in_backward}
