"""The order in which compiled code runs its kernels, and the memory that it keeps for a later result.

torch's compiler sorts the kernels of a graph again after fusion, and takes the order whose estimated peak is the lowest. Two of its four
candidates are here (`torch._inductor.memory`, torch 2.11 to 2.13): the order of the graph, and the greedy one that runs first what frees most.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, fx

from lightning_unified.planner.fake.compiled.kernels import Kernel
from lightning_unified.planner.fake.compiled.operations import bytes_of, is_fusible, is_view

__all__ = ["memory_kept", "ordered", "overwritten"]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_HELD = ("primals_", "arg", "fwd_rng_state", "bwd_rng_state")  # `get_freeable_input_buf`: inputs that outlive the graph


def ordered(kernels: Sequence[Kernel], outputs: Iterable[fx.Node]) -> list[Kernel]:
    """Return the kernels in the order of compiled code.

    Args:
        kernels: The kernels of a graph, in the order of their first operations.
        outputs: Nodes that the graph returns.
    """
    plan = _Dependencies(kernels, frozenset(outputs))
    return min(plan.by_graph(), plan.by_freed_bytes(), key=lambda order: max(plan.levels(order)))


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

    Compiled code hands the memory of a tensor that ends to the next result of its dtype and size, if the estimated peak stays as it is. The memory
    is not free in between. Inputs of the graph and results of calls that allocate for themselves have no part in it.

    Args:
        kernels: The kernels in their order.
        outputs: Nodes that the graph returns.
        ends: The tensors that end with each kernel.

    Source:
        `AllocateLine.plan` and `should_reuse_buffer` in torch's `_inductor/codegen/wrapper.py`, torch 2.11 to 2.13.
    """
    levels = _Dependencies(kernels, frozenset(outputs)).levels(kernels)
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


class _Dependencies:
    """Kernels, what they wait for, and the tensors between them."""

    def __init__(self, kernels: Sequence[Kernel], outputs: frozenset[fx.Node]) -> None:
        self._kernels, self._outputs = kernels, outputs
        maker = {result: kernel for kernel in kernels for result in kernel.results}
        self._sources = {kernel: kernel.sources for kernel in kernels}
        self._before = {
            kernel: sorted({maker[one] for one in self._sources[kernel] if one in maker}, key=lambda one: one.first)
            for kernel in kernels
        }
        self._made = {kernel: sum(map(bytes_of, kernel.results)) for kernel in kernels}
        self._readers: dict[fx.Node, int] = dict.fromkeys(maker, 0)
        for sources in self._sources.values():
            for one in sources:
                self._readers[one] = self._readers.get(one, 0) + 1
        self._bytes = {one: bytes_of(one) for one in self._readers if _is_freed(one) and one not in outputs}

    def by_graph(self) -> list[Kernel]:
        """Return the order of the graph; what a kernel waits for runs right before it."""
        order: dict[Kernel, None] = {}
        for kernel in self._kernels:
            waiting = [(kernel, iter(self._before[kernel]))]
            while waiting:
                one, before = waiting[-1]
                following = next((each for each in before if each not in order), None)
                if following is None:
                    order[one] = None
                    waiting.pop()
                else:
                    waiting.append((following, iter(self._before[following])))
        return list(order)

    def by_freed_bytes(self) -> list[Kernel]:
        """Return an order in which the kernel that adds fewest bytes runs next.

        Kernels whose results fit under the peak so far count as if they allocated nothing.
        """
        left = {kernel: len(before) for kernel, before in self._before.items()}
        after: dict[Kernel, list[Kernel]] = {kernel: [] for kernel in self._kernels}
        for kernel, before in self._before.items():
            for one in before:
                after[one].append(kernel)
        readers = dict(self._readers)
        live = self._inputs()
        peak = max(live, sum(bytes_of(one) for one in self._outputs))
        ready = {kernel for kernel, count in left.items() if not count}
        order: list[Kernel] = []

        def freed(kernel: Kernel) -> int:
            ends = sum(self._bytes.get(one, 0) for one in self._sources[kernel] if readers[one] == 1)
            return ends + sum(self._bytes.get(one, 0) for one in kernel.results if not readers[one])

        while ready:
            gap = peak - live
            kernel = min(
                ready,
                key=lambda one: (
                    self._made[one] if self._made[one] > gap else 0,
                    self._made[one] - freed(one),
                    one.first,
                ),
            )
            ready.remove(kernel)
            order.append(kernel)
            live += self._made[kernel]
            peak = max(peak, live)
            live -= freed(kernel)
            for one in self._sources[kernel]:
                readers[one] -= 1
            for one in after[kernel]:
                left[one] -= 1
                if not left[one]:
                    ready.add(one)
        return order

    def levels(self, order: Sequence[Kernel]) -> list[int]:
        """Return the bytes that live during each of the kernels in this order."""
        readers = dict(self._readers)
        live, levels = self._inputs(), list[int]()
        for kernel in order:
            live += self._made[kernel]
            levels.append(live)
            live -= sum(self._bytes.get(one, 0) for one in kernel.results if not readers[one])
            for one in self._sources[kernel]:
                readers[one] -= 1
                if not readers[one]:
                    live -= self._bytes.get(one, 0)
        return levels

    def _inputs(self) -> int:
        """Return the bytes of inputs that may be freed before the end."""
        return sum(count for one, count in self._bytes.items() if one.op == "placeholder")


def _is_freed(node: fx.Node) -> bool:
    return node.op != "placeholder" or not node.name.startswith(_HELD)
