"""The state that FSDP2 keeps within an iteration: set up, and reset after a step that failed.

This is the one file that touches private names of `fully_shard`, but for `exactness.parameters.formats`, which reads policies. torch has
`FSDPModule.reset_iter_state()` since 2.13. It frees gathered parameters, and since 2.15 it drops reduced gradients; a rank may have to keep
both. So the reset is ours on all versions; `tests/step/sharding/test_iteration.py` compares it with torch's.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from lightning_unified.step.ranks.consensus import Ranks

__all__ = [
    "VotedCollectives",
    "accumulate_in_reduced_format",
    "divisors_of",
    "groups_of",
    "hold_whole",
    "initialize",
    "reset_iteration",
    "set_collectives",
    "sharded_in",
    "whole_parameters_in",
]


def groups_of(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of all sharded modules, the inner ones first and the root's, `""`, last.

    Call it before `hold_whole`. None if `module` itself is not sharded, or one of them with other options than a mesh.
    """
    sharded = [(name, child) for name, child in module.named_modules() if isinstance(child, FSDPModule)]
    if not isinstance(module, FSDPModule) or not all(_has_defaults(child._get_fsdp_state()) for _, child in sharded):
        return None
    return tuple(name for name, _ in reversed(sharded))


def _has_defaults(state: Any) -> bool:
    """Return whether a group holds one module and has torch's own options."""
    return (
        len(state._modules) == 1
        and getattr(state, "_auto_reshard_after_forward", None) is True  # torch below 2.13 may not tell
        and state._mp_policy == MixedPrecisionPolicy()
        and all(type(group.offload_policy) is OffloadPolicy for group in _groups(state))
    )


def initialize(roots: Iterable[FSDPModule]) -> None:
    """Make each of `roots` the root of the sharded modules in it, before any of these runs forward by itself.

    FSDP2 does so at the first forward pass of the root. A `training_step` may call a block before the root, or never call the root.
    """
    for root in roots:
        root._get_fsdp_state()._lazy_init()


def sharded_in(roots: Iterable[FSDPModule]) -> Iterator[FSDPModule]:
    """Yield each of `roots` and all sharded modules in it."""
    for root in roots:
        modules: Iterable[nn.Module] = root.modules()  # pyright: ignore[reportAttributeAccessIssue]  # it is an nn.Module
        yield from (module for module in modules if isinstance(module, FSDPModule))


def hold_whole(roots: Iterable[FSDPModule]) -> None:
    """Let forward and backward passes neither free gathered parameters nor reduce gradients."""
    for root in roots:
        root.set_requires_gradient_sync(False)
        root.set_reshard_after_forward(False)
        root.set_reshard_after_backward(False)


def accumulate_in_reduced_format(roots: Iterable[FSDPModule]) -> None:
    """Let whole gradients have the format of the reduction, if the module's policy names one.

    Call it when parameters are whole. Before torch 2.15, FSDP2 accumulates these gradients in an attribute of its own otherwise.
    """
    for root in roots:
        for state in root._get_fsdp_state()._state_ctx.all_states:
            for parameter in (one for group in _groups(state) for one in group.fsdp_params):
                if parameter.reduce_dtype is not None:
                    parameter._unsharded_param.grad_dtype = parameter.reduce_dtype


def whole_parameters_in(roots: Iterable[FSDPModule]) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole parameters that have been gathered so far, with their names below the roots."""
    for root in roots:
        for state in root._get_fsdp_state()._state_ctx.all_states:
            for one in (one for group in _groups(state) for one in group.fsdp_params):
                whole = getattr(one, "_unsharded_param", None)  # made by the first all-gather
                if whole is not None:
                    yield one._param_fqn or "of a sharded module", whole


def divisors_of(roots: Iterable[FSDPModule]) -> dict[int, float]:
    """Return what the sums of gradients are divided by, by the id of the sharded parameter.

    Only parameters whose module has called `set_gradient_divide_factor`; all others have the mean over ranks.
    """
    return {
        id(one.sharded_param): group.gradient_divide_factor
        for root in roots
        for state in root._get_fsdp_state()._state_ctx.all_states
        for group in _groups(state)
        if group.gradient_divide_factor is not None
        for one in group.fsdp_params
    }


def reset_iteration(roots: Iterable[FSDPModule], *, reshards: bool) -> None:
    """Make sharded modules ready for the next forward pass after one that failed.

    Waits for collectives in flight, and drops what FSDP2 keeps between the passes of an iteration. Reduced gradients stay.

    Args:
        roots: The outermost sharded modules.
        reshards: Whether gathered parameters and their gradients are freed. `FSDPModule.reset_iter_state()` frees the
            parameters only: gradients that a failed backward pass has not reduced would be added to the next ones (before torch 2.15).
            A step that holds whole parameters needs both again.
    """
    for root in roots:
        state: Any = root._get_fsdp_state()
        if state._is_root is None:
            continue  # no pass has begun yet
        handle: Any = state._device_handle
        wait = handle.current_stream().wait_event
        _drop_collectives(state._comm_ctx, wait)
        for one in state._state_ctx.all_states:
            one._modules_to_run_forward.clear()
            one._training_state = TrainingState.IDLE
            for group in _groups(one):
                _reset_group(group, wait)
                if reshards:
                    _drop_whole_gradients(group)
                    group._to_sharded()
                _widen_gradients(group)
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        if hasattr(state._comm_ctx, "active_gradient_reduction"):  # since torch 2.15
            state._comm_ctx.active_gradient_reduction = state._state_ctx.manual_backward_finalization_active = None
            state._state_ctx.gradient_reduction_pending = False


def _groups(state: Any) -> Iterator[Any]:
    """Yield the groups of parameters of a module: several since torch 2.13, at most one before."""
    groups = getattr(state, "_fsdp_param_groups", None)
    yield from [one for one in (state._fsdp_param_group,) if one is not None] if groups is None else groups


def _drop_collectives(context: Any, wait: Callable[[Any], object]) -> None:
    """Wait for the collectives of all groups, and drop their buffers."""
    last = getattr(context, "reduce_scatter_state", None)  # one buffer, before torch 2.13
    held = [context.all_gather_state, last, *getattr(context, "reduce_scatter_states", ())]
    for one in held:
        if one is not None and one.event is not None:
            wait(one.event)
    context.all_gather_state = None
    if hasattr(context, "reduce_scatter_state"):
        context.reduce_scatter_state = None
    getattr(context, "reduce_scatter_states", []).clear()
    events = getattr(context, "_last_post_reduce_events", {})
    for event in events.values():
        wait(event)
    events.clear()
    context.post_forward_order.clear()


def _reset_group(group: Any, wait: Callable[[Any], object]) -> None:
    """Wait for the collectives of one group, and drop what it keeps of the iteration."""
    gathered = group._all_gather_result
    if gathered is not None:
        if gathered.all_gather_event is not None:
            wait(gathered.all_gather_event)
        if isinstance(gathered.all_gather_work, dist.Work):
            gathered.all_gather_work.wait()
        group._all_gather_result = None
    reduced = getattr(group._all_reduce_state, "event", None)
    for event in (group._post_reduce_event, reduced, group._reshard_after_forward_event):
        if event is not None:
            wait(event)
    group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
    group._partial_reduce_output = None
    if hasattr(group, "_post_backward_pending"):  # since torch 2.15
        group._post_backward_pending = False
        group._partial_reduce_output_layout.clear()
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE


def _widen_gradients(group: Any) -> None:
    """Let whole gradients have the format that they accumulate in.

    Since torch 2.15, a backward pass may form them in the narrower format of the parameters until it ends.
    """
    if hasattr(group, "_set_unsharded_grad_dtypes"):
        group._set_unsharded_grad_dtypes(defer_upcast=False)


def _drop_whole_gradients(group: Any) -> None:
    for parameter in group.fsdp_params:
        if "unsharded_accumulated_grad" in vars(parameter):  # since torch 2.15 a property that returns `whole.grad`
            parameter.unsharded_accumulated_grad = None
        whole = getattr(parameter, "_unsharded_param", None)  # made by the first all-gather
        if whole is not None:
            whole.grad = None


class VotedCollectives:
    """The all-gather and the reduce-scatter of sharded modules, each after a vote of the ranks.

    A rank that is out of memory cannot take part in a collective, and the others would wait for it. FSDP2 calls these objects
    when the buffers of a collective are allocated and before it is enqueued. So a vote here finds every rank either ready, or
    failed before this collective. A process that is gone is named.

    Attributes:
        ranks: All ranks of the run.
        vote: Called before each collective with its description; raises if another rank has failed. None while ranks do not
            vote.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.vote: Callable[[str], object] | None = None

    def begin(self, kind: str, sent: Tensor) -> None:
        """Vote on a collective that sends a tensor, if ranks vote now."""
        if self.vote is not None:
            self.vote(f"{kind} of {sent.numel()} {sent.dtype}")


class _Allocates:
    def __init__(self, voted: VotedCollectives) -> None:
        self._voted = voted

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the memory of a collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocates):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._voted.begin("all-gather", input_tensor)
        with self._voted.ranks.losses_named():
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_Allocates):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._voted.begin("reduce-scatter", input_tensor)
        with self._voted.ranks.losses_named():
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def set_collectives(roots: Iterable[FSDPModule], voted: VotedCollectives) -> None:
    """Let all sharded modules in `roots` run their collectives through `voted`."""
    for module in sharded_in(roots):
        module.set_custom_all_gather(_AllGather(voted))  # pyright: ignore[reportArgumentType]
        module.set_custom_reduce_scatter(_ReduceScatter(voted))  # pyright: ignore[reportArgumentType]
