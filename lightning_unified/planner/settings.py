"""The settings of the memory options that a search compares, in the order in which it looks at them."""

from collections.abc import Sequence

from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planner.setting import Setting

__all__ = ["settings_to_compare"]

_SHARES = (
    0.5,
    0.25,
    0.75,
)  # of the blocks, between none and all: what lies between two of these gains a few percent of the time


def settings_to_compare(
    precision: str,
    *,
    policies: Sequence[RecomputePolicy],
    kernels: Sequence[str] = (),
    chunks: Sequence[int | None] = (None,),
) -> list[Setting]:
    """Return the settings, the user's own first and then the one that needs least; the rest by what it is likely to be worth.

    Not the product of all memory options: kernels and chunks are varied with nothing and with everything recomputed.

    Args:
        precision: Lightning's name.
        policies: What may be recomputed, from the least to the most.
        kernels: Those that may be chosen instead of the optimizer's own.
        chunks: Rows of logits at once that may be chosen; None leaves the module as it is.
    """
    own = Setting(precision=precision, recompute=policies[0])
    ends = [policies[0], policies[-1]] if len(policies) > 1 else [policies[0]]
    found = [Setting(precision=precision, recompute=policy) for policy in (*ends, *_between(policies))]
    smallest = min((chunk for chunk in chunks if chunk is not None), default=None)
    for chunk in [chunk for chunk in chunks if chunk is not None]:
        found += [Setting(precision=precision, recompute=policy, loss_chunk=chunk) for policy in ends]
    for kernel in kernels:
        for chunk in dict.fromkeys((None, smallest)):
            found += [
                Setting(precision=precision, recompute=policy, loss_chunk=chunk, optimizer_kernel=kernel)
                for policy in ends
            ]
    return list(dict.fromkeys([own, *found]))


def _between(policies: Sequence[RecomputePolicy]) -> list[RecomputePolicy]:
    """Return a few policies between none and all: all blocks with attention kept, and some of the blocks."""
    kept = [policy for policy in policies if policy.blocks == "all" and policy.keep_attention]
    counted = [policy for policy in policies if policy.blocks not in (0, "all") and not policy.keep_attention]
    count = len(counted) + 1
    wanted = dict.fromkeys(max(1, round(share * count)) for share in _SHARES)
    return [*kept, *(policy for blocks in wanted for policy in counted if policy.blocks == blocks)]
