"""Memory of compiled code that a later result takes over from a tensor that has ended."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, fx

from lightning_unified.planner.fake.compiled.kernels import Kernel
from lightning_unified.planner.fake.compiled.operations import bytes_of, is_fusible, is_view
from lightning_unified.planner.fake.compiled.order import live_bytes

__all__ = ["memory_kept", "overwritten"]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def overwritten(kernel: Kernel, ending: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return the inputs of a fused kernel whose memory its results take, and these results.

    Each result takes that of one input of its size that ends there and that no other result reads.

    Args:
        kernel: The kernel.
        ending: The tensors that end with it.
    """
    if not kernel.is_fused:
        return {}
    readers = Counter(one for sources in kernel.reads.values() for one in sources)
    free = [one for one in ending if readers[one] == 1 and one not in kernel.results and not _is_incoming(one)]
    found: dict[fx.Node, fx.Node] = {}
    for node in kernel.nodes:
        fits = (one for one in free if one in kernel.reads[node] and bytes_of(one) == bytes_of(node))
        one = None if _is_stored_in_parts(node) else next(fits, None)
        if one is not None:
            free.remove(one)
            found[one] = node
    return found


def memory_kept(
    kernels: Sequence[Kernel], outputs: Iterable[fx.Node], *, ends: Sequence[Sequence[fx.Node]]
) -> Mapping[fx.Node, fx.Node]:
    """Return the tensors whose memory is kept for a later result, and that result.

    Compiled code hands the memory of a tensor that ends to the next result of its dtype and size, if the estimated peak stays as it is. The
    memory is not free in between. Inputs of the graph have no part in it, nor have results of calls that allocate for themselves.

    Args:
        kernels: The kernels in their order.
        outputs: Nodes that the graph returns.
        ends: The tensors that end with each kernel.

    Source:
        `AllocateLine.plan` and `should_reuse_buffer` in torch's `_inductor/codegen/wrapper.py`, torch 2.11 to 2.13.
    """
    levels = live_bytes(kernels, outputs)
    peak = max(levels, default=0)
    free: dict[tuple[object, int], list[tuple[int, fx.Node]]] = {}
    kept: dict[fx.Node, fx.Node] = {}
    for at, (kernel, ending) in enumerate(zip(kernels, ends, strict=False)):
        gone = overwritten(kernel, ending)
        allocated = set(kernel.results if _writes_given_memory(kernel) else ()).difference(ending, gone.values())
        for result in (one for one in kernel.results if one in allocated):
            waiting = free.get(_kind(result))
            if not waiting:
                continue
            since, one = waiting[-1]
            between = range(since + 1, at)
            if between and bytes_of(result) + max(levels[index] for index in between) > peak:
                continue
            waiting.pop()
            kept[one] = result
            for index in between:
                levels[index] += bytes_of(result)
        for one in ending:
            is_result = one.op != "placeholder" and one not in kernel.results
            if is_result and one not in gone and not _is_stored_in_parts(one):
                free.setdefault(_kind(one), []).append((at, one))
    return kept


def _is_incoming(node: fx.Node) -> bool:
    """Return whether a tensor is an incoming gradient.

    Compiled code writes over saved activations, and over no other input.
    """
    return node.op == "placeholder" and node.name.startswith("tangents")


def _writes_given_memory(kernel: Kernel) -> bool:
    """Return whether compiled code allocates the results of a kernel: its own, and those of matrix products."""
    (first, *_) = kernel.nodes
    return kernel.is_fused or getattr(getattr(first.target, "overloadpacket", None), "__name__", "") in _PRODUCTS


def _is_stored_in_parts(node: fx.Node) -> bool:
    """Return whether attention reads parts of a fused result: compiled code stores each of them for itself."""
    waiting = [user for user in node.users if is_view(user)] if is_fusible(node) else []
    while waiting:
        part = waiting.pop()
        waiting += [user for user in part.users if is_view(user)]
        if bytes_of(part) < bytes_of(node) and any("scaled_dot_product" in str(user.target) for user in part.users):
            return True
    return False


def _kind(node: fx.Node) -> tuple[object, int]:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None, bytes_of(node)
