"""Combinations of memory options for one step, and the combinations that a search compares."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightning_unified.nn.recomputing import RecomputePolicy

__all__ = ["Combination", "combinations_to_compare", "with_larger_chunks", "with_usual_chunks"]

_REPEATED = 0.8  # judgement: share of a block's forward pass that runs again when the attention output is saved
_CHEAPEST = (
    0.7  # judgement: share of a block's forward pass that runs again in a graph that keeps nothing but its inputs
)
_SHARES = (0.5, 0.25, 0.75)  # of the blocks; shares between two of these gain only a few percent of the step time


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """One combination of memory options.

    Attributes:
        recompute: Which blocks recompute their activations; None leaves the module as it is.
        precision: Lightning's name.
        optimizer_kernel: `"fused"`, `"foreach"` or `"for-loop"`; None leaves the optimizer as the user built it.
        loss_chunk: Rows of logits that the chunked loss computes at a time; None leaves the module as it is.
        attention: `"chunked"` computes attention in chunks of queries; None leaves it to torch.
        always: Whether a search looks at it however long the search takes; no memory option.
    """

    precision: str
    recompute: RecomputePolicy | None = None
    optimizer_kernel: str | None = None
    loss_chunk: int | None = None
    attention: str | None = None
    always: bool = field(default=False, compare=False)

    @property
    def recomputes(self) -> bool:
        """Whether any block recomputes its activations."""
        return self.recompute is not None and self.recompute.blocks != 0

    @property
    def changes(self) -> int:
        """The number of memory options that differ from the user's."""
        others = (self.optimizer_kernel, self.loss_chunk, self.attention)
        return self.recomputes + sum(option is not None for option in others)

    @property
    def again(self) -> float:
        """The share of the blocks' forward pass that runs again in the backward pass."""
        policy = self.recompute
        if policy is None or policy.blocks == 0:
            return 0.0
        if policy.kept is not None:
            larger = 0.0 if policy.kept_last is None else policy.kept_last - policy.kept
            return _CHEAPEST * (1 - policy.kept - larger * policy.last / (policy.of or policy.last or 1))
        share = 1.0 if policy.blocks == "all" or not policy.of else policy.blocks / policy.of
        return share * (_REPEATED if policy.keep_attention else 1.0)


def combinations_to_compare(
    precision: str,
    *,
    policies: Sequence[RecomputePolicy],
    kernels: Sequence[str] = (),
    chunks: Sequence[int | None] = (None,),
    attentions: Sequence[str | None] = (None,),
) -> list[Combination]:
    """Return the combinations to compare, in the order in which a search looks at them.

    A search looks at the first ones however long it takes: the user's own, the one that needs the least memory, a middle loss chunk with and
    without recomputation, recomputation with the user's own loss, and attention in chunks alone. The others follow by expected gain. The
    smallest chunk is slow on a GPU, and its dry runs have many operations. The list is not the full product: kernels and other chunks are
    combined with no recomputation and with full recomputation only, and the larger ones also with compiled blocks that keep a share.

    Args:
        precision: Lightning's name.
        policies: The allowed recomputation policies, from the least to the most recomputation.
        kernels: Optimizer kernels that may replace the optimizer's own.
        chunks: Allowed loss chunks, in rows of logits, the user's own first; None leaves the module as it is.
        attentions: Allowed kinds of attention, the user's own first; None leaves it to torch.
    """
    first, *others = chunks
    smallest = min((chunk for chunk in others if chunk is not None), default=first)
    middle = sorted(others)[(len(others) - 1) // 2] if others else first  # pyright: ignore[reportArgumentType]
    larger = [chunk for chunk in others if chunk not in (middle, smallest)]
    none, most, last = policies[0], policies[-1], attentions[-1]
    always = [
        (none, first, attentions[0]),
        (most, smallest, last),
        *([(none, middle, attentions[0]), (most, middle, last), (most, first, last)] if others else []),
        *((none, first, attention) for attention in attentions[1:]),
    ]
    found = [
        Combination(precision=precision, recompute=policy, loss_chunk=chunk, attention=attention, always=True)
        for policy, chunk, attention in always
    ]
    ends = list(dict.fromkeys((none, most)))
    for policy, chunk, kernel in (
        *((policy, chunk, None) for chunk in (first, middle) for policy in (*ends, *_between(policies))),
        *((policy, chunk, None) for chunk in larger for policy in policies if policy.kept is not None),
        *((policy, chunk, None) for chunk in others for policy in ends),
        *((policy, chunk, kernel) for kernel in kernels for chunk in (first, smallest) for policy in ends),
    ):
        one = Combination(precision=precision, recompute=policy, loss_chunk=chunk, optimizer_kernel=kernel)
        found += [replace(one, attention=attention) for attention in attentions]
    return list(dict.fromkeys(found))


def with_larger_chunks(combination: Combination, combinations: Sequence[Combination]) -> list[Combination]:
    """Return `combination` with each larger loss chunk among `combinations`, the largest first.

    The result is empty if the combination leaves the loss to the module.
    """
    own = combination.loss_chunk
    chunks = {one.loss_chunk for one in combinations if own and one.loss_chunk and one.loss_chunk > own}
    return [replace(combination, loss_chunk=chunk, always=True) for chunk in sorted(chunks, reverse=True)]


def with_usual_chunks(combinations: Sequence[Combination]) -> list[Combination]:
    """Leave out combinations whose loss chunk no search looks at always.

    Those of compiled blocks that keep a share stay.
    """
    usual = {one.loss_chunk for one in combinations if one.always}
    return [
        one
        for one in combinations
        if one.loss_chunk in usual or (one.recompute is not None and one.recompute.kept is not None)
    ]


def _between(policies: Sequence[RecomputePolicy]) -> list[RecomputePolicy]:
    """Return a few policies between none and all.

    First all blocks with saved attention outputs or a share of their activations, then shares of the blocks.
    """
    saved = [
        policy for policy in policies if policy.blocks == "all" and (policy.keep_attention or policy.kept is not None)
    ]
    counted = [policy for policy in policies if policy.blocks not in (0, "all") and not policy.keep_attention]
    count = len(counted) + 1
    wanted = dict.fromkeys(max(1, round(share * count)) for share in _SHARES)
    return [*saved, *(policy for blocks in wanted for policy in counted if policy.blocks == blocks)]
