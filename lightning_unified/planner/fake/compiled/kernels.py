"""Kernels of a compiled graph: which results are stored, and which operations are fused into one kernel.

torch's compiler fuses element-wise operations, reductions and copies. A result that only operations of its own kernel read takes no memory.
A result is stored if another kernel needs it: matrix products, attention and other library calls read stored tensors only.

Operations also share a kernel if they read the same tensors, though none reads the other's result. Such a kernel allocates all of its
results before it frees what it reads. The gradient of a gated activation has up to four results of the layer's largest size.

The rules follow `torch._inductor.scheduler` (torch 2.11 to 2.13): the pairs that share the most bytes are fused first, if their loops
have the same size and no third kernel has to run between them.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from lightning_unified.planner.fake.compiled.operations import bytes_of, is_fusible, is_reduction, is_view

__all__ = ["Kernel", "kernels_of"]

_FARTHEST = 64  # `Scheduler.are_long_distant_nodes`: operations farther apart are not fused
_ROUNDS = 10  # `Scheduler.fuse_nodes` tries again this often
_FEW_READS = 4  # `config.realize_reads_threshold`: a result with more reads and several uses is stored


@dataclass(eq=False, slots=True)
class Kernel:
    """A library call, or operations that run in one kernel.

    Attributes:
        nodes: The library call, or the operations whose results are stored, in the order of the graph.
        results: The nodes whose values are the stored tensors: `nodes`, or the items of a call that returns several.
        reads: For each of `nodes`, the stored tensors that it reads.
        first: Position of the first of `nodes` among all kernels before fusion.
        last: Position of the last one.
        is_fused: Whether compiled code computes it; False for a library call.
        loops: The loops of compiled code; None for a library call.
    """

    nodes: list[fx.Node]
    results: list[fx.Node]
    reads: dict[fx.Node, set[fx.Node]]
    first: int
    last: int
    is_fused: bool
    loops: "_Loops | None"

    @property
    def sources(self) -> set[fx.Node]:
        """The stored tensors that the kernel reads and does not make."""
        return set().union(*self.reads.values()).difference(self.results)


@dataclass(frozen=True, slots=True)
class _Loops:
    """The loops of a kernel: over the results, and inside over what a reduction reduces.

    Attributes:
        points: Number of results of a reduction, or of points of an element-wise operation.
        reduced: Number of points that each result of a reduction reads; 1 for an element-wise operation.
        are_rows: Whether each result reads neighbouring points.
    """

    points: int
    reduced: int
    are_rows: bool

    def join(self, other: "_Loops") -> "_Loops | None":
        """Return the loops of a kernel of both; None if there is none."""
        if self.reduced == other.reduced == 1:
            return self if self.points == other.points else None
        if 1 in (self.reduced, other.reduced):
            point, reduction = (self, other) if self.reduced == 1 else (other, self)
            fits = reduction.are_rows and point.points in (reduction.points, reduction.points * reduction.reduced)
            return reduction if fits else None
        equal = (self.points, self.reduced, self.are_rows) == (other.points, other.reduced, other.are_rows)
        return self if equal else None


def kernels_of(graph: fx.Graph) -> tuple[list[Kernel], set[fx.Node]]:
    """Return the kernels of a compiler's graph, and the stored tensors that it returns.

    The kernels are in the order of their first operations.

    Args:
        graph: A graph of decomposed operations, whose nodes have their tensors in `meta["val"]`.
    """
    *_, output = graph.nodes
    fusible = {node for node in graph.nodes if is_fusible(node)}
    stored = _stored(graph, fusible)
    at = {node: index for index, node in enumerate(graph.nodes)}
    stored_at = {node: _stored_at(node, at, fusible) if node in stored else len(at) for node in fusible}

    def read_by(node: fx.Node) -> set[fx.Node]:
        return _sources(node, lambda one: stored_at.get(one, -1) > at[node])

    kernels: list[Kernel] = []
    for node in graph.nodes:
        is_call = node not in fusible and node.op not in ("placeholder", "get_attr", "output")
        if (is_call and not _is_item_of_call(node, fusible)) or node in stored:
            items = [user for user in node.users if _is_item_of_call(user, fusible)]
            kernels.append(
                Kernel(
                    nodes=[node],
                    results=items or [node],
                    reads={node: read_by(node)},
                    first=len(kernels),
                    last=len(kernels),
                    is_fused=node in stored,
                    loops=_loops(node) if node in stored else None,
                )
            )
    return _fused(kernels), read_by(output)


def _fused(kernels: list[Kernel]) -> list[Kernel]:
    """Fuse kernels that may be one, those that share the most bytes first."""
    groups = _Groups(kernels)
    for _ in range(_ROUNDS):
        fused = [groups.fuse(one, other) for one, other in groups.pairs()]
        if not any(fused):
            break
    return sorted(groups.kernels, key=lambda kernel: kernel.first)


class _Groups:
    """The kernels of a graph while they are fused.

    Args:
        kernels: One kernel for each operation whose result is stored, and for each library call.
    """

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self._of: dict[fx.Node, Kernel] = {}
        self._at = {kernel.nodes[0]: kernel.first for kernel in kernels}
        self._users: dict[fx.Node, list[fx.Node]] = {}
        for kernel in kernels:
            self._of |= dict.fromkeys([*kernel.nodes, *kernel.results], kernel)
            for node, sources in kernel.reads.items():
                for source in sources:
                    self._users.setdefault(source, []).append(node)

    @property
    def kernels(self) -> set[Kernel]:
        """The kernels as they are fused so far."""
        return set(self._of.values())

    def pairs(self) -> list[tuple[fx.Node, fx.Node]]:
        """Return a node of each of two kernels that share stored tensors, best pairs first."""
        shared: dict[tuple[Kernel, Kernel], int] = {}
        for tensor, users in self._users.items():
            near = {self._of[user]: None for user in users if self._of[user].is_fused}
            if tensor in self._of and self._of[tensor].is_fused:
                near[self._of[tensor]] = None
            ordered = sorted(near, key=lambda kernel: kernel.first)
            for index, one in enumerate(ordered):
                for other in ordered[index + 1 :]:
                    shared[one, other] = shared.get((one, other), 0) + bytes_of(tensor)

        def rank(pair: tuple[Kernel, Kernel]) -> tuple[bool, int, int]:
            one, other = pair
            assert one.loops is not None
            assert other.loops is not None
            return (one.loops.reduced == 1) != (other.loops.reduced == 1), -shared[pair], other.first - one.first

        return [(one.nodes[0], other.nodes[0]) for one, other in sorted(shared, key=rank)]

    def fuse(self, first: fx.Node, second: fx.Node) -> bool:
        """Fuse the kernels of two nodes if they may be one, and return whether they were."""
        one, other = sorted((self._of[first], self._of[second]), key=lambda kernel: kernel.first)
        if one is other or max(abs(one.first - other.last), abs(other.first - one.last)) > _FARTHEST:
            return False
        assert one.loops is not None
        assert other.loops is not None
        loops = one.loops.join(other.loops)
        if loops is None or self._is_between(one, other) or self._is_between(other, one):
            return False
        one.nodes = sorted([*one.nodes, *other.nodes], key=self._at.__getitem__)
        one.results, one.reads, one.loops = one.nodes, one.reads | other.reads, loops
        one.first, one.last = min(one.first, other.first), max(one.last, other.last)
        self._of |= dict.fromkeys(other.nodes, one)
        return True

    def _is_between(self, one: Kernel, other: Kernel) -> bool:
        """Return whether a third kernel reads from `one`, perhaps by others, and is read by `other`."""
        waiting, seen = [one], {one}
        while waiting:
            kernel = waiting.pop()
            for result in kernel.results:
                for user in self._users.get(result, ()):
                    reader = self._of[user]
                    if reader is other and kernel is not one:
                        return True
                    if reader is not other and reader not in seen and reader.first <= other.last:
                        seen.add(reader)
                        waiting.append(reader)
        return False


def _is_item_of_call(node: fx.Node, fusible: set[fx.Node]) -> bool:
    return node.target is operator.getitem and node not in fusible


def _stored(graph: fx.Graph, fusible: set[fx.Node]) -> set[fx.Node]:
    """Return the fusible nodes whose results compiled code may store.

    Fusion leaves out those that only their own kernel reads.
    """
    stored = {node for node in fusible if _is_stored(node, fusible)}
    for node in graph.nodes:
        if node in fusible and node not in stored and not is_view(node) and len(node.users) > 1:
            sources = _sources(node, lambda one: one in fusible and one not in stored)
            if len(sources) > _FEW_READS:
                stored.add(node)
    return stored


def _is_stored(node: fx.Node, fusible: set[fx.Node]) -> bool:
    """Return whether compiled code stores the result of a fusible operation."""
    if is_view(node):
        return False
    return is_reduction(node) or _is_read(node, fusible)


def _is_read(node: fx.Node, fusible: set[fx.Node]) -> bool:
    """Return whether the output or a library call reads the result or a view of it."""
    return any(user not in fusible or (is_view(user) and _is_read(user, fusible)) for user in node.users)


def _stored_at(node: fx.Node, at: Mapping[fx.Node, int], fusible: set[fx.Node]) -> int:
    """Return the position from which on operations read the stored result.

    Earlier operations compute the result for themselves. The compiler stores reductions at once, and results with several uses of which one
    is a library call or the output. It stores others when it comes to the first library call that reads them, perhaps through a view.
    """
    is_used_twice = len(node.users) > 1 and any(user not in fusible for user in node.users)
    if (
        is_reduction(node) or is_used_twice or not _is_read(node, fusible)
    ):  # the last are stored because of their many reads
        return at[node]
    views = [_stored_at(user, at, fusible) for user in node.users if user in fusible and is_view(user)]
    return min([*views, *(at[user] for user in node.users if user not in fusible)], default=len(at))


def _sources(node: fx.Node, is_inlined: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Return the stored tensors that a kernel reads to compute a node."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if is_inlined(one):
            waiting += one.all_input_nodes
        elif one.op != "get_attr":
            found.add(one)
    return found


def _loops(node: fx.Node) -> _Loops:
    """Return the loops of an operation by itself."""
    results = (leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor))
    points = next((int(one.numel()) for one in results), 1)
    if not is_reduction(node):
        return _Loops(points, 1, are_rows=True)
    given = next(one.meta["val"] for one in node.all_input_nodes if isinstance(one.meta.get("val"), Tensor))
    sizes = [int(size) for size in given.shape]
    axes = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], Sequence) else range(len(sizes))
    reduced = {axis % max(len(sizes), 1) for axis in axes if isinstance(axis, int)}
    kept = [axis for axis in range(len(sizes)) if axis not in reduced and sizes[axis] != 1]
    are_rows = not kept or max(kept) < min((axis for axis in reduced if sizes[axis] != 1), default=len(sizes))
    return _Loops(points, max(int(given.numel()) // max(points, 1), 1), are_rows=are_rows)
