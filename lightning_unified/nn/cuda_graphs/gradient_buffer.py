"""One place for the gradients of recorded backward passes and of their parameters: a graph writes to fixed addresses, every time."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

__all__ = ["GradientRoom", "differentiate"]


class GradientRoom:
    """Where recorded backward passes add up the gradients of a network's trained parameters: one block for each dtype.

    What autograd gets are views of it, which it keeps as the parameters' gradients: they are in memory once. The room is used again
    once nobody has any of them any more, as after `zero_grad`.

    Args:
        parameters: The trained ones, by name.

    Attributes:
        parameters: The same.
        blocks: The memory, as many bytes as the parameters have.
        places: Of each parameter's gradient in it, by name, in the order of `parameters`.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        self.blocks: list[Tensor] = []
        self._members: list[list[str]] = []
        for dtype in dict.fromkeys(one.dtype for one in parameters.values()):
            # those that would leave the next one unaligned come last: kernels of many tensors are slower on such
            names = sorted(
                (n for n, p in parameters.items() if p.dtype is dtype), key=lambda n: parameters[n].numel() % 16 > 0
            )
            count, device = sum(parameters[name].numel() for name in names), parameters[names[0]].device
            self.blocks.append(torch.empty(count, dtype=dtype, device=device))
            self._members.append(names)
        self.places = self._views(self.blocks)
        self._own = [_users(block) for block in self.blocks]

    def _views(self, blocks: Sequence[Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for block, names in zip(blocks, self._members, strict=True):
            shapes = [self.parameters[name] for name in names]
            found |= zip(names, _unflatten_dense_tensors(block, shapes), strict=True)
        return {name: found[name] for name in self.parameters}

    def receive(self, add: Callable[[], None], *, used: Sequence[bool]) -> list[Tensor | None]:
        """Have gradients added to the places, and return what autograd is to have of each; None for what it has, or gets nothing of.

        Where the parameters' gradients are the places already, as of an earlier part of a batch, that was all. Where somebody else
        has kept them, they keep their values.

        Args:
            add: Adds gradients to the places.
            used: Which of them.
        """
        if not self._is_held:
            self._clear()
            add()
            return self._given(self.blocks, used)
        if self._are_gradients(used):
            add()
            return [None] * len(used)
        before = [block.clone() for block in self.blocks]
        self._clear()
        add()
        new = [block.clone() for block in self.blocks]
        for block, values in zip(self.blocks, before, strict=True):
            block.copy_(values)
        return self._given(new, used)

    def adopt(self) -> None:
        """Make the places the gradients that parameters have by now, with their values, so that those are not in memory beside them."""
        if self._is_held or _reduces():
            return
        for one, place in zip(self.parameters.values(), self._views(self.blocks).values(), strict=True):
            if one.grad is not None and one.grad.layout == torch.strided:
                one.grad = place.copy_(one.grad)

    @property
    def _is_held(self) -> bool:
        """Whether anybody has a part of it."""
        return [_users(block) for block in self.blocks] != self._own

    def _clear(self) -> None:
        for block in self.blocks:
            block.zero_()

    def _given(self, blocks: Sequence[Tensor], used: Sequence[bool]) -> list[Tensor | None]:
        return [one if is_used else None for one, is_used in zip(self._views(blocks).values(), used, strict=True)]

    def _are_gradients(self, used: Sequence[bool]) -> bool:
        """Return whether the places are gradients of their parameters, nobody else's, and nothing is to run when more is added."""
        if _reduces():
            return False
        users = dict(zip((block.data_ptr() for block in self.blocks), self._own, strict=True))
        for (name, one), is_used in zip(self.parameters.items(), used, strict=True):
            place = self.places[name]
            has_place = one.grad is not None and one.grad.data_ptr() == place.data_ptr()
            hooks = one._backward_hooks or getattr(one, "_post_accumulate_grad_hooks", None)
            if is_used and (hooks or not has_place):
                return False
            if has_place:
                users[place.untyped_storage().data_ptr()] += 1
        return [_users(block) for block in self.blocks] == list(users.values())


def _reduces() -> bool:
    """Return whether gradients may be reduced over processes, for which autograd is waited for and buckets may be their memory."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _users(block: Tensor) -> int:
    """Return how many tensors share the memory of `block`, and a constant."""
    return torch._C._storage_Use_Count(block.untyped_storage()._cdata)  # pyright: ignore[reportAttributeAccessIssue]  # torch/_inductor/cudagraph_trees.py


def differentiate(
    outputs: Sequence[Tensor],
    *,
    leaves: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    incoming: Sequence[Tensor | None],
    room: GradientRoom,
) -> tuple[list[bool], list[Tensor]]:
    """Add the gradients of `leaves` to their places as they come, each freed at once, and return which came, and those of `inputs`.

    Args:
        outputs: Of the network; those that require a gradient are differentiated.
        leaves: What stands for the parameters, by name.
        inputs: Tensors whose gradient is wanted.
        incoming: Gradients of the outputs, None for one that has none.
        room: Of the parameters.
    """
    hooks = [leaf.register_hook(partial(_add, room.places[name])) for name, leaf in leaves.items()]
    try:
        got = torch.autograd.grad(
            [one for one in outputs if one.requires_grad],
            [*leaves.values(), *inputs],
            [one for one in incoming if one is not None],
            allow_unused=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    return [one is not None for one in got[: len(leaves)]], list(got[len(leaves) :])


def _add(place: Tensor, grad: Tensor) -> Tensor:
    """Add a gradient to its place, and let autograd have the place instead."""
    return place.add_(grad)
