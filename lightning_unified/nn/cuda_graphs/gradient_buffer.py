"""Gradient buffer: fixed addresses to which recorded backward passes write their gradients."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from lightning_unified.nn.autograd_limits import has_hooks
from lightning_unified.nn.cross_entropy.added_gradient import received_by
from lightning_unified.nn.cuda_graphs.addresses import users

__all__ = ["GradientBuffer", "add_to_places", "differentiate", "leave_places", "reduces"]

_SMALL = 2**16  # judgement: elements; larger gradients are freed at once, smaller ones share the launches of their sums


class GradientBuffer:
    """The gradients of a network's trained parameters, one block for each dtype.

    Autograd receives views of the buffer and keeps them as the parameters' gradients, so that each gradient is in memory once.
    The buffer is used again as soon as no tensor shares it, for example after `zero_grad`.

    Args:
        parameters: The trained parameters by name.

    Attributes:
        parameters: The same.
        blocks: The memory, as many bytes as the parameters have.
        places: The view of each parameter's gradient by name, in the order of `parameters`.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        self.blocks: list[Tensor] = []
        self._members: list[list[str]] = []
        for dtype in dict.fromkeys(one.dtype for one in parameters.values()):
            # sizes that would leave the next tensor unaligned come last: multi-tensor kernels are slower on unaligned memory
            names = sorted(
                (n for n, p in parameters.items() if p.dtype is dtype), key=lambda n: parameters[n].numel() % 16 > 0
            )
            count, device = sum(parameters[name].numel() for name in names), parameters[names[0]].device
            self.blocks.append(torch.empty(count, dtype=dtype, device=device))
            self._members.append(names)
        self.places = self._views(self.blocks)
        self._own = [users(block) for block in self.blocks]

    def gather(self, parameters: Mapping[str, Tensor]) -> "GradientBuffer":
        """Return a buffer for `parameters`, with their current gradients moved into it.

        That is this buffer if names, shapes, dtypes and devices are equal. Gradients pass through the host's memory, so that the device
        never holds them twice, and no gradient keeps a block of the allocator from being freed. Gradients stay where they are if
        some lie in this buffer already, and while processes may reduce them.

        Raises:
            torch.OutOfMemoryError: If there is no memory for the buffer; gradients are as before.
        """
        fits = _kinds(parameters) == _kinds(self.places)
        if fits:
            self.parameters = parameters
        if reduces() or (fits and self.is_held):
            return self if fits else GradientBuffer(parameters)
        aside: dict[str, Tensor] = {}
        try:
            _set_aside(parameters, aside)
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # the buffer would keep a larger cached block that recordings could never use
            buffer = self if fits else GradientBuffer(parameters)
        except BaseException:
            for name, gradient in aside.items():
                parameters[name].grad = gradient.to(parameters[name].device)
            raise
        places = buffer._views(buffer.blocks)
        for name, gradient in aside.items():
            parameters[name].grad = places[name].copy_(gradient)
        return buffer

    def _views(self, blocks: Sequence[Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for block, names in zip(blocks, self._members, strict=True):
            shapes = [self.parameters[name] for name in names]
            found |= zip(names, _unflatten_dense_tensors(block, shapes), strict=True)
        return {name: found[name] for name in self.parameters}

    def receive(self, add: Callable[[], None], *, used: Sequence[bool]) -> list[Tensor | None]:
        """Add gradients to the buffer; return each parameter's gradient for autograd.

        None stands for a parameter without a gradient. It also stands for a gradient that lies in the buffer already, as after
        an earlier micro-batch. A parameter that is used outside of the recording too (tied weights) may have its gradient elsewhere, and
        autograd adds to it. Tensors that share the buffer for another reason keep their values.

        Args:
            add: Adds gradients to the places.
            used: Whether each place receives a gradient.
        """
        if not self.is_held:
            self._clear()
            add()
            return self._given(self.blocks, used)
        outside = self._gradients_outside(used)
        if outside is not None:
            for name in outside:
                self.places[name].zero_()
            add()
            return [one if name in outside else None for name, one in self._views(self.blocks).items()]
        before = [block.clone() for block in self.blocks]
        self._clear()
        add()
        new = [block.clone() for block in self.blocks]
        for block, values in zip(self.blocks, before, strict=True):
            block.copy_(values)
        return self._given(new, used)

    def take_in(self) -> None:
        """Move gradients outside of the buffer into it.

        It must hold other gradients and nothing else. The first gradient of a parameter that is used outside of the recording too (tied
        weights) is made elsewhere. Two tensors of the parameter's size would be held then until `zero_grad`.
        """
        outside = self._gradients_outside([True] * len(self.places)) if self.is_held else None
        for name in outside or ():
            one, place = self.parameters[name], self.places[name]
            own = one.grad
            if own is None or has_hooks(one):
                continue
            if own.layout == torch.strided and own.dtype == place.dtype:
                one.grad = self._views(self.blocks)[name].copy_(own)

    @property
    def is_held(self) -> bool:
        """Whether a tensor outside shares the buffer."""
        return [users(block) for block in self.blocks] != self._own

    def _clear(self) -> None:
        for block in self.blocks:
            block.zero_()

    def _given(self, blocks: Sequence[Tensor], used: Sequence[bool]) -> list[Tensor | None]:
        return [one if is_used else None for one, is_used in zip(self._views(blocks).values(), used, strict=True)]

    def _gradients_outside(self, used: Sequence[bool]) -> set[str] | None:
        """Return the names of the used parameters whose gradient does not lie in the buffer.

        The result is None if anything but gradients shares the buffer, or if a hook must run: a parameter's hooks have to run
        whenever a gradient is added.
        """
        if reduces():
            return None
        found: set[str] = set()
        expected = dict(zip((block.data_ptr() for block in self.blocks), self._own, strict=True))
        for (name, one), is_used in zip(self.parameters.items(), used, strict=True):
            place = self.places[name]
            has_place = one.grad is not None and one.grad.data_ptr() == place.data_ptr()
            if is_used and has_place and has_hooks(one):
                return None
            if has_place:
                expected[place.untyped_storage().data_ptr()] += 1
            elif is_used:
                found.add(name)
        return found if [users(block) for block in self.blocks] == list(expected.values()) else None


def _set_aside(parameters: Mapping[str, Tensor], aside: dict[str, Tensor]) -> None:
    """Move the dense gradients of `parameters` into the host's memory, one by one."""
    for name, one in parameters.items():
        if one.grad is not None and one.grad.layout == torch.strided:
            aside[name] = one.grad.cpu()
            one.grad = None


def _kinds(tensors: Mapping[str, Tensor]) -> list[tuple[Any, ...]]:
    return [(name, one.shape, one.dtype, one.device) for name, one in tensors.items()]


def reduces() -> bool:
    """Return whether processes may reduce gradients.

    Such reductions wait for autograd, and their buckets may hold the gradients.
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def add_to_places(places: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add gradients to their places."""
    if len(places) == 1:  # torch's kernel for many tensors leaves most of a GPU idle if it gets one
        places[0].add_(gradients[0])
    else:
        torch._foreach_add_([*places], [*gradients])  # pyright: ignore[reportPrivateImportUsage]


def leave_places(places: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Leave the places as they are, as in a rehearsal."""


def differentiate(
    outputs: Sequence[Tensor],
    *,
    leaves: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    incoming: Sequence[Tensor | None],
    buffer: GradientBuffer,
    put: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = add_to_places,
) -> tuple[list[bool], list[Tensor]]:
    """Put the gradients of `leaves` into their places.

    Large ones are put there at once and freed, small ones together at the end. Return which leaves have a gradient, and the gradients of
    `inputs`.

    Args:
        outputs: The network's outputs; outputs that require a gradient are differentiated.
        leaves: The tensors that stand for the parameters, by name.
        inputs: Tensors whose gradient is needed.
        incoming: Gradients of the outputs, None for an output without one.
        buffer: The gradient buffer of the parameters.
        put: Function of places and their gradients.
    """
    received: set[str] = set()

    def receive(name: str, gradient: Tensor) -> None:
        put([buffer.places[name]], [gradient])
        received.add(name)

    def replace(name: str, gradient: Tensor) -> Tensor:
        receive(name, gradient)
        return buffer.places[name]  # so the gradient is freed

    large = {name: leaf for name, leaf in leaves.items() if leaf.numel() > _SMALL}
    hooks = [leaf.register_hook(partial(replace, name)) for name, leaf in large.items()]
    try:
        with received_by({leaf: partial(receive, name) for name, leaf in leaves.items()}):
            got = torch.autograd.grad(
                [one for one in outputs if one.requires_grad],
                [*leaves.values(), *inputs],
                [one for one in incoming if one is not None],
                allow_unused=True,
            )
    finally:
        for hook in hooks:
            hook.remove()
    small = {name: one for name, one in zip(leaves, got, strict=False) if one is not None and name not in large}
    if small:
        put([buffer.places[name] for name in small], [*small.values()])
    return [name in received or name in small for name in leaves], list(got[len(leaves) :])
