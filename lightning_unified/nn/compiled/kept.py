"""Compile graphs with exact gradients that keep a share of their activations.

Torch's partitioner chooses the activations that a graph keeps; the backward pass computes the others again. Two kinds of values would then be
others: random numbers, if only a share of the activations is kept, and inputs that the forward pass writes, such as buffers
(pytorch/pytorch pull request 197039). `mark_kept_values` makes the graph keep both, and the results of attention.

A share is a value of `torch._functorch.config.activation_memory_budget`: the operations that run again are those with the fewest
floating-point operations for the bytes they free.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from lightning_unified.nn.compiled.parts import COMPILED_CALL

__all__ = ["Compiler", "KeepsShare", "keeping_share", "keeps_share", "mark_kept_values"]

_LEAST = 1e-3  # a share of 0 would keep the inputs alone, without the seeds of random numbers
_BUILT_IN = frozenset({"aten", "prims", "prim"})


class KeepsShare(Protocol):
    """A compiled call whose graphs can keep fewer activations."""

    def keep(self, share: float | None) -> None:
        """Keep a share of the activations from the next call on; None for the fastest step."""
        ...


def keeps_share(module: nn.Module) -> KeepsShare | None:
    """Return the module's compiled call if its graphs can keep fewer activations.

    Only calls that this package compiled can. Graphs of other calls may exist already.
    """
    call: Any = vars(module).get(COMPILED_CALL)
    return call if hasattr(call, "keep") else None


def keeping_share(share: float | None) -> AbstractContextManager[Any]:
    """Return a context in which torch's graphs keep a share of their activations.

    A share of 0 keeps the inputs and the seeds of random numbers. None changes nothing.
    """
    if share is None:
        return nullcontext()
    from torch._functorch import config

    return config.patch(activation_memory_budget=max(share, _LEAST))


def mark_kept_values(graph: fx.Graph) -> None:
    """Let a joint graph keep values that a second run would not find, and results of attention.

    The former are the results of operations that draw random numbers, or may draw them (operations of other libraries), and the inputs that the
    graph writes. Attention is the operation that takes the most time for the bytes of its results. Left alone, the partitioner
    takes cuDNN's attention to cost nothing and runs it again, and it runs no attention again that it knows in a graph with a variable number of rows.
    So every share above 0 keeps the results of attention, and a share of 0 those of the attention that it knows.
    """
    from torch._functorch import config

    share = config.activation_memory_budget
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        is_kept = share < 1 and _is_attention(node.target) and (share > _LEAST or _is_known(node.target))
        if is_kept or _may_draw(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    written = {node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default}
    places = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_before(places[-1].next if places else None):
        for place in places:
            if place in written:
                _read_before_it_is_written(graph, place)


def _read_before_it_is_written(graph: fx.Graph, place: fx.Node) -> None:
    """Let all readers of a written input read a copy from the beginning of the graph."""
    copy = graph.call_function(torch.ops.aten.clone.default, (place,))
    value = place.meta["val"]
    with value.fake_mode:
        copy.meta = {"val": value.clone(), "recompute": CheckpointPolicy.MUST_SAVE}

    def reads(user: fx.Node) -> bool:
        return user is not copy and not (user.target is torch.ops.aten.copy_.default and user.args[0] is place)

    place.replace_all_uses_with(copy, delete_user_cb=reads)


def _is_attention(operator: Any) -> bool:
    """Return whether an operator computes attention in a forward pass."""
    name = operator._schema.name
    return name.startswith("aten::") and "attention" in name and "backward" not in name


def _is_known(operator: Any) -> bool:
    """Return whether torch's partitioner counts an operator among those that take long."""
    from torch._functorch.partitioners import get_default_op_list

    return operator.overloadpacket in get_default_op_list().compute_intensive_ops


def _may_draw(node: fx.Node) -> bool:
    operator: Any = node.target
    if operator.namespace not in _BUILT_IN:
        return True
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [argument.name for argument in operator._schema.arguments]
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")  # attention draws for its dropout only
    given = node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return not (isinstance(given, float) and given == 0.0)


@dataclass(frozen=True)
class Compiler:
    """Torch's inductor backend, with `mark_kept_values`.

    Calls with equal backends share their graphs.

    Args:
        share: The share of their activations that graphs keep; None for those of the fastest step.
    """

    share: float | None = None

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Compile a graph."""
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        with keeping_share(self.share):
            return compile_fx(graph, inputs, config_patches={"joint_custom_post_pass": _pass_after(config)})


def _pass_after(config: Any) -> Any:
    """Return a pass that runs the user's own passes, and then `mark_kept_values`."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    given: Any = config.joint_custom_post_pass  # one, or a sequence since torch 2.13
    own = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]

    class KeepChangingValues(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            for each in own:
                each(graph)
            mark_kept_values(graph)

        def uuid(self) -> Any:
            """Return the pass's key in torch's cache of graphs; None for no cache."""
            return None if own else get_hash_for_files((__file__,))

    return KeepChangingValues()
