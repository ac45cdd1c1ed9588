"""The order in which compiled code runs its kernels.

torch's compiler sorts the kernels of a graph again after fusion, and takes the order whose estimated peak is the lowest. Two of its four
candidates are here (`torch._inductor.memory`, torch 2.11 to 2.13): the order of the graph, and the greedy one that runs first what frees most.
"""

from collections.abc import Iterable, Sequence

from torch import fx

from lightning_unified.planner.fake.compiled.kernels import Kernel
from lightning_unified.planner.fake.compiled.operations import bytes_of

__all__ = ["live_bytes", "ordered"]

_HELD = ("primals_", "arg", "fwd_rng_state", "bwd_rng_state")  # `get_freeable_input_buf`: inputs that outlive the graph


def ordered(kernels: Sequence[Kernel], outputs: Iterable[fx.Node]) -> list[Kernel]:
    """Return the kernels in the order of compiled code.

    Args:
        kernels: The kernels of a graph, in the order of their first operations.
        outputs: Nodes that the graph returns.
    """
    plan = _Dependencies(kernels, frozenset(outputs))
    return min(plan.by_graph(), plan.by_freed_bytes(), key=lambda order: max(plan.levels(order), default=0))


def live_bytes(kernels: Sequence[Kernel], outputs: Iterable[fx.Node]) -> list[int]:
    """Return the bytes that live during each kernel, as torch's compiler estimates them.

    Args:
        kernels: The kernels in their order.
        outputs: Nodes that the graph returns.
    """
    return _Dependencies(kernels, frozenset(outputs)).levels(kernels)


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
