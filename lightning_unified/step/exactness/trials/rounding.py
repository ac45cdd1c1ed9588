"""Change parameters by one rounding step, to measure how far rounding moves a gradient.

Two kinds of modules round by more than the constant tolerance of `exactness.gradients`, which does not know them:

- deep networks with 16-bit weights: kernels for fewer rows round differently, and the differences grow from layer to layer;
- modules whose loss has almost vanished: their gradient comes from small differences of large numbers, and in float32 rounding is all of it in the end.

So before a check refuses a module, it measures: the same rows run twice, the second time with the last bit of every weight flipped. A flip changes a
weight by one unit in the last place, about three times the root mean square of a rounding error. The two gradients differ by the module's own
sensitivity to rounding, whatever the loss.

A loss that cannot be split is refused all the same: its gradients differ by more than rounding moves them, or by more than
`MOST` tolerances. Where rounding moves the gradient in float32 by more than that, and earlier batches agreed, a check decides nothing.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["MARGIN", "MOST", "nudged"]

MARGIN = {torch.bfloat16: 1.5, torch.float16: 1.5, torch.float32: 5.0}
"""The multiple of the measured rounding that counts as rounding, by the runs' coarsest format.

Judgement: whole and split runs round independently, and the worst of many parameters varies. In float32, activations round as often as weights: in
20 checks of a network of 100 layers, micro-batches differed by 0.1 to 1.4 times what the flip moves.
"""

MOST = {torch.bfloat16: 5.0, torch.float16: 5.0, torch.float32: 1000.0}
"""The largest multiple of the tolerance that rounding may explain, by the coarsest format of the runs.

Judgement: a tenth of a gradient in bfloat16 and float32. In bfloat16, losses that cannot be split were off by half of it and more.
"""

_LAST_BIT = {torch.bfloat16: (torch.int16, 1), torch.float16: (torch.int16, 1)}
_SINGLE = {
    torch.bfloat16: 1 << 16,
    torch.float16: 1 << 13,
    torch.float32: 1,
}  # the last bit of float32 that a cast keeps


@contextmanager
def nudged(parameters: Iterable[Tensor], lowest: torch.dtype) -> Iterator[bool]:
    """Flip the last mantissa bit of the parameters inside the block, in place, without a copy.

    Args:
        parameters: The parameters. Those in 16 bits are changed; if there are none, those in float32, which autocast may round.
        lowest: The coarsest format of the run: 16 bits or float32.

    Yields:
        Whether any parameter is changed.
    """
    plain = [one.data for one in parameters if type(one.data) is Tensor and one.data.numel()]
    flips = [(one, *_LAST_BIT[one.dtype]) for one in plain if one.dtype in _LAST_BIT]
    if not flips:
        flips = [(one, torch.int32, _SINGLE[lowest]) for one in plain if one.dtype is torch.float32]
    changed: list[tuple[Tensor, torch.dtype, int]] = []
    try:
        for flip in flips:
            _flip(*flip)
            changed.append(flip)
        yield bool(flips)
    finally:
        for flip in changed:
            _flip(*flip)


def _flip(values: Tensor, integers: torch.dtype, bit: int) -> None:
    values.view(integers).bitwise_xor_(bit)
