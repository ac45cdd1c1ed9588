"""Add the work of sampling before a step to its trace, so that predicted seconds include it.

Sampling reads each prompt in one pass and decodes one token a pass for all sequences. A dry run of every pass would take too
long. By formula, a pass launches as many operations as the step's forward pass; it multiplies each parameter once per token,
and reads all weights and the whole cache once.
"""

from dataclasses import dataclass, replace

from lightning_unified.cost_model.generation import Generated
from lightning_unified.cost_model.trace.trace import Passes, Trace, Work

__all__ = ["with_sampling"]

_RECORDED = ("cuda", "rocm")  # backends that decode by replayed graphs: one launch a token


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """Operations of a forward pass: launches of the host, kernels of the device, their dtype."""

    launches: int
    kernels: int
    dtype: str


def with_sampling(trace: Trace, sampled: Generated, *, like: Trace | None = None) -> Trace:
    """Return the trace with the work of sampling, at its end and in a phase of its own.

    All sequences count with all their new tokens. Sequences that end earlier take less time.

    Args:
        trace: The step after the sampling.
        sampled: The sampling before the step.
        like: The step whose forward pass a pass of sampling resembles: the user's own, because memory options change no sampling. None for
            `trace` itself.
    """
    once = _forward_pass(trace if like is None else like)
    passes = max(sampled.new - 1, 0)  # the pass over the prompt gives the first token
    prompts = Passes(
        op="prompts",
        phase="sampling",
        flops=2 * sampled.parameters * sampled.prompts * sampled.prompt,
        moved=sampled.bytes.weights,
        dtype=once.dtype,
        launches=once.launches,
        kernels=once.kernels,
    )
    tokens = Passes(
        op="new tokens",
        phase="sampling",
        flops=2 * sampled.parameters * sampled.rows * passes,
        moved=(sampled.bytes.weights + sampled.bytes.cache) * passes,
        dtype=once.dtype,
        launches=passes if trace.backend in _RECORDED else once.launches * passes,
        kernels=once.kernels * passes,
    )
    return replace(trace, events=(*trace.events, prompts, tokens))


def _forward_pass(trace: Trace) -> _Pass:
    works = [event for event in trace.events if isinstance(event, Work) and event.phase == "forward"]
    heaviest = max(works, key=lambda work: work.flops, default=Work("", "forward", dtype="float32"))
    return _Pass(
        launches=len(works) // trace.num_micro_batches,
        kernels=sum(bool(work.flops or work.moved) for work in works) // trace.num_micro_batches,
        dtype=heaviest.dtype,
    )
