"""Average gradients and broadcast buffers over ranks without allocating memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from lightning_unified.errors import ConfigurationError
from lightning_unified.step.ranks.consensus import Ranks
from lightning_unified.step.ranks.overlap import Overlap
from lightning_unified.step.recovery.oom import caught
from lightning_unified.units import MIB

__all__ = ["LARGE", "Replicas", "bytes_of", "flat_memory", "scratch_bytes_of"]

# Judgement: tensors below 1 MiB share a collective, because one of their own would be mostly latency.
LARGE = MIB
_SCRATCH = 16 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bucket:
    """The tensors of one collective: a large tensor in place, or small ones in scratch memory."""

    members: tuple[int, ...]
    views: tuple[Tensor, ...] = ()
    flat: Tensor | None = None


def scratch_bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of scratch memory, at most 16 MiB: those of all tensors below 1 MiB."""
    small = sum(bytes_of(value) for value in tensors if bytes_of(value) < LARGE)
    return min(max(LARGE, -(-small // 16) * 16), _SCRATCH)  # a multiple of 16, which every dtype's size divides


def _nothing(_tensors: Sequence[Tensor]) -> None:
    """Do nothing."""


class Replicas:
    """The ranks' copies of one module: equal parameters and buffers, averaged gradients.

    It replaces `DistributedDataParallel`, which starts to reduce in the middle of the backward pass. There, a rank that
    runs out of memory leaves the others waiting. DDP also keeps a second copy of all gradients in its buckets. Here a
    reduction begins when every rank has queued its backward pass, and so has memory for it. On CUDA it runs beside the end of
    that pass (`Overlap`). It needs a scratch memory of at most 16 MiB, allocated beforehand. A rank may still run out of
    memory while it copies to or from that memory. It then takes part in every collective and raises afterwards.

    Attributes:
        strategy: The name of the strategy, for errors.
    """

    strategy = "unified_ddp"

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._parameters = [(name, value) for name, value in module.named_parameters() if name not in ignored]
        # the present tensors, as in DDP: a module may later replace one by another of a different size on each rank
        self._buffers = [(name, value) for name, value in module.named_buffers() if name not in ignored]
        held = [value for _, value in (*self._parameters, *self._buffers)]
        device = held[0].device if held else torch.device("cpu")
        self._scratch = torch.zeros(scratch_bytes_of(held), dtype=torch.uint8, device=device)
        self._plans: dict[object, list[_Bucket]] = {}

    @property
    def scratch(self) -> Tensor:
        """Memory that a reduction needs beside the gradients, reserved from the start."""
        return self._scratch

    @property
    def scratch_bytes(self) -> int:
        """Bytes of `scratch`."""
        return self._scratch.numel()

    @property
    def description(self) -> str:
        """Names, shapes, strides and types of all parameters and buffers, one a line.

        It is equal on all ranks if they built the same module.
        """
        held = (*self._parameters, *self._buffers)
        return "\n".join(f"{name} {tuple(value.shape)} {value.stride()} {value.dtype}" for name, value in held)

    def copy_from_first(self, *, with_parameters: bool = False) -> None:
        """Write the first rank's buffers, and its parameters if requested, into those of all ranks.

        The ranks' tensors have equal shapes and types.

        Raises:
            torch.OutOfMemoryError: If copying needed memory that this rank did not have; all collectives are over then.
        """
        if with_parameters:
            self._ranks.expect(parameters=len(self._parameters))
            self._ranks.average(self._scratch)  # backends allocate memory at their first reduction, so run one now
            self._each([value.detach() for _, value in self._parameters], self._send, scale=None, like="parameters")
        self._each([value for _, value in self._buffers], self._send, scale=None, like="buffers")

    def absent(self) -> int:
        """Return a mask of the parameters without a gradient, a bit each.

        Large gradients whose memory is ordered differently from their parameter's are copied first, so that they can be
        reduced in place.

        Raises:
            ConfigurationError: If a gradient is sparse.
        """
        mask = 0
        for index, (name, parameter) in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None:
                mask |= 1 << index
            elif gradient.layout != torch.strided:
                raise ConfigurationError(
                    f'strategy="{self.strategy}" averages dense gradients, and that of {name} is {gradient.layout}; make the layer with '
                    'sparse=False, or use strategy="ddp".'
                )
            elif bytes_of(gradient) >= LARGE and _order(gradient) != _order(parameter):
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
        return mask

    def fill(self, absent: int) -> None:
        """Give a gradient of zeros to each parameter that has one on another rank only.

        `absent` is the mask of parameters without a gradient on any rank.
        """
        for index, (_, parameter) in enumerate(self._parameters):
            if parameter.grad is None and not absent >> index & 1:
                parameter.grad = torch.zeros_like(parameter)

    def average_gradients(self, absent: int) -> None:
        """Replace the gradients of all ranks by their mean.

        As in `DistributedDataParallel`, each rank divides its gradients, and then they are summed. On CUDA no gradient of 1 MiB or more waits
        for the rest of the backward pass.

        `absent` is the mask of parameters without a gradient on any rank, which are left out.

        Raises:
            torch.OutOfMemoryError: If copying needed memory that this rank did not have; all collectives are over then.
        """
        gradients = [
            parameter.grad
            for index, (_, parameter) in enumerate(self._parameters)
            if parameter.grad is not None and not absent >> index & 1
        ]
        with self._beside_backward() as complete:
            self._each(gradients, self._ranks.average, scale=1.0 / self._ranks.size, like=absent, complete=complete)

    @cached_property
    def _overlap(self) -> Overlap | None:
        """The stream of reductions on CUDA; made when the first ones are due, so that not every subclass has one."""
        large = [value for _, value in self._parameters if bytes_of(value) >= LARGE]
        uses_streams = self._scratch.is_cuda and self._ranks.are_real
        return Overlap(large, self._scratch.device) if uses_streams else None

    @contextmanager
    def _beside_backward(self) -> Iterator[Callable[[Sequence[Tensor]], None]]:
        """Run collectives inside the block beside the end of the backward pass.

        The block gets a function that waits on the device until given gradients are complete.
        """
        if self._overlap is None:
            yield _nothing
        else:
            with self._overlap.running() as complete:
                yield complete

    def _each(
        self,
        tensors: Sequence[Tensor],
        collective: Callable[[Tensor], None],
        *,
        scale: float | None,
        like: object,
        complete: Callable[[Sequence[Tensor]], None] = _nothing,
    ) -> None:
        """Run `collective` over all `tensors`, even if this rank runs out of memory meanwhile.

        Args:
            tensors: The same ones on all ranks.
            collective: Called with pieces of memory.
            scale: The factor that each number is multiplied by first; None for none.
            like: A key for the shapes and types of `tensors`, so that buckets are planned once.
            complete: Called with the tensors of a collective before it begins.
        """
        shortages = []

        def local(work: Callable[[], object]) -> None:
            shortages.append(caught(work)[1])

        with torch.no_grad():
            for bucket in self._plan(tensors, like):
                members = [tensors[index] for index in bucket.members]
                complete(members)
                flat = flat_memory(members[0]) if bucket.flat is None else bucket.flat
                if bucket.flat is not None:
                    local(partial(_copy, bucket.views, members))
                if scale is not None:
                    local(partial(flat.mul_, scale))
                collective(torch.view_as_real(flat) if flat.is_complex() else flat)
                if bucket.flat is not None:
                    local(partial(_copy, members, bucket.views))
        reason = next((shortage for shortage in shortages if shortage is not None), None)
        if reason is not None:
            raise torch.OutOfMemoryError(reason)

    def _plan(self, tensors: Sequence[Tensor], like: object) -> list[_Bucket]:
        if like not in self._plans:
            if len(self._plans) > 8:
                self._plans.clear()
            self._plans[like] = self._planned(tensors)
        return self._plans[like]

    def _planned(self, tensors: Sequence[Tensor]) -> list[_Bucket]:
        # the last parameters have their gradients first
        large = [index for index, tensor in enumerate(tensors) if bytes_of(tensor) >= LARGE]
        buckets = [_Bucket(members=(index,)) for index in reversed(large)]
        groups: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor.numel() and bytes_of(tensor) < LARGE:
                group = groups.setdefault(tensor.dtype, [])
                if sum(bytes_of(tensors[member]) for member in group) + bytes_of(tensor) > len(self._scratch):
                    buckets.append(self._together(group, tensors))
                    group.clear()
                group.append(index)
        return buckets + [self._together(group, tensors) for group in groups.values()]

    def _together(self, members: Sequence[int], tensors: Sequence[Tensor]) -> _Bucket:
        shapes = [tensors[index].shape for index in members]
        flat = self._scratch.view(tensors[members[0]].dtype)[: sum(shape.numel() for shape in shapes)]
        views = [part.view(shape) for part, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
        return _Bucket(members=tuple(members), views=tuple(views), flat=flat)

    def _send(self, flat: Tensor) -> None:
        # as bytes, because not every backend supports every dtype
        self._ranks.broadcast(flat.view(torch.uint8), source=0)


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's entries."""
    return tensor.numel() * tensor.element_size()


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]


def flat_memory(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor without gaps as one row, in the order of its strides.

    Raises:
        ConfigurationError: If there are gaps, or entries that share memory.
    """
    laid_out = tensor.permute(sorted(range(tensor.dim()), key=lambda dimension: -tensor.stride(dimension)))
    if not laid_out.is_contiguous():
        raise ConfigurationError(
            f'strategy="unified_ddp" needs parameters and buffers that are whole pieces of memory, and one of shape {tuple(tensor.shape)} '
            f"has strides {tensor.stride()}; make it contiguous()."
        )
    # one entry of a slice keeps the slice's stride, with which no other format can be viewed
    return laid_out.view(()).view(1) if laid_out.numel() == 1 else laid_out.view(-1)


def _order(tensor: Tensor) -> list[int]:
    """Return the strides of dimensions above size 1: the order of entries in memory."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
