"""The operations near the loss, as a fact: a term of the loss that is switched on shows there."""

from collections import deque

from torch import Tensor

__all__ = ["GraphFact", "graph_fact"]

GraphFact = tuple[str, str, int]

_NODES = 64  # judgement: terms are added near the loss, and reading so many nodes takes less than 0.1 ms


def graph_fact(loss: Tensor) -> GraphFact:
    """Return a fact about the 64 nodes of autograd's graph that are nearest to a loss.

    It holds their names and their connections, but no values or shapes. So it is the same for batches of other sizes.
    """
    found: list[tuple[str, tuple[int, ...]]] = []
    waiting, numbers = deque([loss.grad_fn]), {loss.grad_fn: 0}
    while waiting and len(found) < _NODES:
        node = waiting.popleft()
        if node is None:
            continue
        following = [before for before, _ in node.next_functions]
        for before in following:
            if before not in numbers:
                numbers[before] = len(numbers)
                waiting.append(before)
        found.append((node.name(), tuple(numbers[before] for before in following)))
    return "the loss", "graph", hash(tuple(found))
