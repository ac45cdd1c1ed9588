"""Change parameters by one rounding step, to measure how far rounding moves a gradient.

In a deep network with 16-bit weights, kernels for fewer rows round differently, and the differences grow from layer to layer. The
constant tolerance of `exactness.gradients` does not know the network. So before a check refuses such a network, it measures: the
same rows run twice, the second time with the last bit of every 16-bit weight flipped. A flip changes a weight by one unit in the
last place, about three times the root mean square of a rounding error. The two gradients differ by the network's own sensitivity
to rounding, whatever the loss.

A loss that cannot be split is refused all the same: its gradients differ by more than rounding moves them, or by more than
`MOST` tolerances.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["MOST", "nudged"]

MOST = 5.0
"""The largest multiple of the tolerance that rounding may explain.

Judgement: a tenth of a gradient in bfloat16, where losses that cannot be split were off by half of it and more.
"""

_LAST_BIT = {torch.bfloat16: (torch.int16, 1), torch.float16: (torch.int16, 1)}
_SINGLE = {torch.bfloat16: 1 << 16, torch.float16: 1 << 13}  # the last bit that a cast to 16 bits keeps


@contextmanager
def nudged(parameters: Iterable[Tensor], lowest: torch.dtype) -> Iterator[bool]:
    """Flip the last mantissa bit of the parameters inside the block, in place, without a copy.

    Args:
        parameters: The parameters. Those in 16 bits are changed; if there are none, those in float32, which autocast rounds.
        lowest: The 16-bit format of the run.

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
