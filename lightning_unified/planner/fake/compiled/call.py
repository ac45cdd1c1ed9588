"""Run a compiled module on fake tensors: the compiler's partitioned graphs, not its code.

torch's ahead-of-time autograd traces the module's call and partitions it into a forward and a backward graph, with the decompositions and
the partitioner of the inductor backend. The tensors saved between the two graphs are those that compiled code saves.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy
from typing_extensions import override

from lightning_unified.cost_model.backends.patching import replaced
from lightning_unified.nn.compiled import keeping_share, mark_kept_values
from lightning_unified.planner.fake.compiled.fused_graph import FusedGraph
from lightning_unified.planner.fake.recorder import Recorder

__all__ = ["CompiledCall"]

_CHECKPOINTED = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
"""What torch's non-reentrant checkpointing runs around a call.

The first is there since torch 2.14; the settings of the second are positional.
"""

_PLACE = type("Place", (), {"__repr__": lambda _: "tensor"})()  # stands for a tensor among the arguments


class CompiledCall:
    """The call of a module as compiled code runs it, on fake tensors.

    Put it in place of the module's call, inside `fake_world`. Graphs are shared by modules that print alike and get tensors of the same
    shapes, such as the blocks of a network.

    Args:
        call: The call without compilation.
        module: The module, whose parameters and buffers are inputs of the graph; None for a function.
        recorder: Notes the operations of the graphs.
        graphs: The graphs made so far, to be shared between the modules of one fake copy.
        only_with_gradients: Whether the call is not compiled where no gradients are computed.
    """

    _is_tracing = False

    def __init__(
        self,
        call: Callable[..., Any],
        *,
        module: nn.Module | None = None,
        recorder: Recorder,
        graphs: dict[Any, Callable[..., Any]],
        only_with_gradients: bool = False,
    ) -> None:
        self._module, self._call, self._recorder, self._graphs = module, call, recorder, graphs
        self._only_with_gradients = only_with_gradients
        self._text = repr(call if module is None else module)
        self._share: float | None = None

    def keep(self, share: float | None) -> None:
        """Let the graphs keep a share of their activations; None lets them keep those of the fastest step."""
        self._share = share

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if CompiledCall._is_tracing or (self._only_with_gradients and not torch.is_grad_enabled()):
            return self._call(*args, **kwargs)  # in the first case, the graph of another module contains this one
        module = self._module
        state = {} if module is None else {**dict(module.named_parameters()), **dict(module.named_buffers())}
        leaves, spec = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = tuple(_PLACE if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        tensors = [*state.values(), *given]
        key = (
            self._text,
            module is not None and module.training,
            self._share,
            str(spec),
            str(others),
            *_mode(),
            *map(_signature, tensors),
        )
        if key not in self._graphs:
            flat = partial(self._flat, names=list(state), others=others, spec=spec)
            self._graphs[key] = self._graph(flat, tensors, num_state=len(state))
        return self._graphs[key](*tensors)

    def _flat(self, *tensors: Tensor, names: list[str], others: tuple[Any, ...], spec: Any) -> Any:
        """Call the module on its parameters, buffers and arguments, given as one list of tensors."""
        state, given = dict(zip(names, tensors, strict=False)), iter(tensors[len(names) :])
        leaves = [next(given) if leaf is _PLACE else leaf for leaf in others]
        args, kwargs = tree_unflatten(leaves, spec)
        if self._module is None:
            return self._call(*args, **kwargs)
        with _reparametrize_module(self._module, state, tie_weights=True):
            return self._call(*args, **kwargs)

    def _graph(self, flat: Callable[..., Any], tensors: list[Tensor], *, num_state: int) -> Callable[..., Any]:
        """Return a function with autograd that runs the partitioned graphs of `flat`.

        The first `num_state` tensors are parameters and buffers.
        """
        from functorch.compile import aot_function
        from torch._inductor.decomposition import select_decomp_table

        def compiler(gm: Any, example_inputs: Any) -> _Graph:  # noqa: ARG001
            return _Graph(gm, self._recorder)

        made = aot_function(
            flat,
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=partial(_partition, num_state=num_state),
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,  # as inductor does, so that a graph shows which buffers it writes
        )
        with self._recorder.paused(paused=True):  # torch keeps the tensors of a trace, and the step's own must end
            tensors = [_alike(tensor) for tensor in tensors]
        CompiledCall._is_tracing = True
        try:
            # hooks of a checkpoint around the call see no tensor of the trace
            with (
                _disable_current_modes(),
                saved_tensors_hooks(_same, _same),
                _tagged(),
                keeping_share(self._share),
                suppress(_TracedError),
            ):
                made(*tensors)
        finally:
            CompiledCall._is_tracing = False
        return made


def _partition(
    joint: fx.GraphModule, inputs: Any, *, num_state: int, **settings: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition a joint graph as the inductor backend does, after its passes.

    They leave out copies and conversions, on which the partitioner's choice depends, and make random numbers again from a seed.

    Args:
        joint: Both passes.
        inputs: Example inputs.
        num_state: The number of its first inputs that live as long as the module, so that saving them takes no memory.
        settings: As torch gives them.
    """
    settings["static_lifetime_input_indices"] = [*range(num_state)]
    from functorch.compile import min_cut_rematerialization_partition
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    mode = detect_fake_mode([node.meta.get("val") for node in joint.graph.nodes])
    with V.set_fake_mode(mode):
        joint = joint_graph_passes(joint, torch.device("cpu"))  # the fake tensors' own device
    mark_kept_values(joint.graph)
    parts = min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **settings)
    with V.set_fake_mode(mode):
        for part in parts:
            _write_in_place(part)
    return parts


def _write_in_place(part: fx.GraphModule) -> None:
    """Let operators write their arguments again, as the inductor backend does after the partition.

    A trace replaces an operator of a library that writes its arguments by one that returns copies of them.
    """
    from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
    from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core

    copying = {torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2}
    if any(node.target in copying for node in part.graph.nodes):
        reinplace_inplaceable_ops_core(part.graph)
        decompose_auto_functionalized(part.graph)
        part.recompile()


class _TracedError(Exception):
    """The first call has made its graphs."""


class _Graph(FusedGraph):
    """A graph that does not run while it is made."""

    @override
    def __call__(self, given: list[Any]) -> Any:
        if CompiledCall._is_tracing:
            raise _TracedError
        return super().__call__(given)


@contextmanager
def _tagged() -> Iterator[None]:
    """Tag the operations of checkpointed calls for the partitioner, as torch's compiler does."""
    calls = count()
    name = next(one for one in _CHECKPOINTED if hasattr(checkpoint, one))

    def marked(_function: Any, *given: Any, **settings: Any) -> Iterator[None]:
        context_fn = settings.get("context_fn") if name == _CHECKPOINTED[0] else given[1]
        mode = None if context_fn is None else context_fn()[0]
        with mode if isinstance(mode, TorchDispatchMode) else _Tags(next(calls)):
            yield

    with replaced(checkpoint, name, marked), fx_traceback.preserve_node_meta():
        yield


class _Tags(TorchDispatchMode):
    """Tag operations that run again in the backward pass, by number of the checkpointed call."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._tags = {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": number}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fx_traceback.current_meta.update(self._tags)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            for name in self._tags:
                fx_traceback.current_meta.pop(name, None)


def _alike(tensor: Tensor) -> Tensor:
    """Return a tensor of the same kind."""
    with torch.no_grad():
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _signature(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _mode() -> tuple[Any, ...]:
    """Return the settings of torch that a graph depends on."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
