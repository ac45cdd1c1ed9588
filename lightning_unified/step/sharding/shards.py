"""Whole parameters and gradients for the time of a step, from and to the ranks' shards."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_unified.errors import OutOfMemoryError, RankError, RunError
from lightning_unified.step.ranks.consensus import Outcome, Point, Ranks, Word
from lightning_unified.step.ranks.reduction import LARGE, Replicas, bytes_of, flat_memory
from lightning_unified.step.recovery.oom import caught, release_cached_memory
from lightning_unified.step.sharding.iteration import (
    VotedCollectives,
    accumulate_in_reduced_format,
    divisors_of,
    hold_whole,
    reset_iteration,
    set_collectives,
    sharded_in,
)
from lightning_unified.step.sharding.kept_shards import refusal_of_hook, refusal_of_lost_write
from lightning_unified.step.sharding.rows import as_dtensor, local, rows_of

__all__ = ["WholeShards", "bytes_of_whole"]

_ATTEMPTS = 3  # judgement: memory of caches and of other programs may be free at the next attempt


class WholeShards(Replicas):
    """A sharded module whose ranks hold whole parameters and gradients during a step.

    All ranks gather the parameters before a step and before an evaluation. Then each runs as a replica of
    `DistributedDataParallel` would, alone, and may undo and repeat its step. When all have their gradients, each gets the
    mean of its own rows, and whole gradients and parameters are freed. So a step needs the memory of whole parameters and
    gradients, and optimizer state is divided by the number of ranks.

    Gathering votes: a rank without memory for it makes all ranks leave, free their caches and try again. The
    reduction allocates nothing but small scratch memory: each rank allocates its rows before the ranks meet.

    Attributes:
        collectives: The collectives of all blocks, which vote while parameters are gathered.
    """

    strategy = "unified_fsdp"

    def __init__(self, module: nn.Module, roots: Sequence[FSDPModule], ranks: Ranks) -> None:
        self._module, self._roots = module, list(roots)
        self.collectives = VotedCollectives(ranks)
        set_collectives(self._roots, self.collectives)
        hold_whole(self._roots)
        self._ranks = ranks
        self._shards: list[Tensor] = []
        self._parameters: list[tuple[str, Tensor]] = []
        self._versions: list[tuple[int, int]] = []
        sharded = dict(module.named_parameters())
        self.gather()
        accumulate_in_reduced_format(self._roots)
        super().__init__(module, ranks)  # of whole parameters
        self._ranks.expect(parameters=len(self._parameters))
        self._shards = [sharded[name] for name, _ in self._parameters]
        self._whole = {id(shard): whole for shard, (_, whole) in zip(self._shards, self._parameters, strict=True)}
        self._sharded = {id(whole): shard for shard, (_, whole) in zip(self._shards, self._parameters, strict=True)}
        self._room: list[Tensor | None] = []
        self._divisors = divisors_of(self._roots)
        for shard, (_, whole) in zip(self._shards, self._parameters, strict=True):
            vars(whole).update(
                vars(shard)
            )  # attributes of the user, such as those by which optimizers group parameters
        self.release()

    @property
    def is_whole(self) -> bool:
        """Whether all parameters of the module are whole."""
        return not any(isinstance(parameter, DTensor) for parameter in self._module.parameters())

    @property
    def whole_parameters(self) -> list[Tensor]:
        """The whole parameters of the module; they have memory while they are gathered."""
        return [whole for _, whole in self._parameters]

    @property
    def hidden(self) -> list[Tensor]:
        """This rank's shards while the module has whole parameters in their places; else none."""
        return list(self._shards) if self.is_whole else []

    def refuse_hooks(self) -> None:
        """Raise `ConfigurationError` for hooks of shards' gradients, which nothing calls."""
        for (name, _), shard in zip(self._parameters, self._shards, strict=True):
            if shard._backward_hooks or shard._post_accumulate_grad_hooks:
                raise refusal_of_hook(name)

    def whole(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the whole parameters, whose gradients a backward pass writes, of an optimizer's sharded ones."""
        return [self._whole.get(id(parameter), parameter) for parameter in parameters]

    def shard_of(self, tensor: Tensor) -> Tensor:
        """Return the sharded parameter of a whole one; any other tensor as it is."""
        return self._sharded.get(id(tensor), tensor)

    def gather(self) -> None:
        """Make all parameters whole, if they are not. All ranks call it together.

        Raises:
            OutOfMemoryError: If this rank has no memory for whole parameters.
            RankError: On the other ranks in that case.
        """
        if self.is_whole:
            return
        self._versions = []
        reason, lacking = self._gathered_once()
        for _ in range(_ATTEMPTS - 1):
            if not lacking:
                break
            reset_iteration(self._roots, reshards=False)
            self.release()
            release_cached_memory(next(iter(self._module.parameters())).device)
            reason, lacking = self._gathered_once()
        if not lacking:
            self._note_versions([local(shard) for shard in self._shards])
            return
        self._ranks.end()
        if reason is None:
            raise RankError(f"rank {lacking[0].rank} has no memory for whole parameters: {lacking[0].text}")
        raise OutOfMemoryError(
            f'whole parameters do not fit on rank {self._ranks.rank} ({reason}). Give hold="shards", which gathers one block at a time, '
            "more memory, or more ranks."
        )

    def _gathered_once(self) -> tuple[str | None, list[Word]]:
        """Gather; return why this rank could not, and what the ranks said that could not."""
        heard: list[list[Word]] = []

        def vote(_collective: str) -> None:
            if lacking := _lacking(self._ranks.meet(Point.GATHER)):
                heard.append(lacking)
                raise MemoryError("another rank has no memory")

        self.collectives.vote = vote
        try:
            _, reason = caught(self._unshard)
        finally:
            self.collectives.vote = None
        if heard:
            return None, heard[0]
        outcome = Outcome.WELL if reason is None else Outcome.SHORT
        return reason, _lacking(self._ranks.meet(Point.GATHER, outcome, text=reason or ""))

    def _unshard(self) -> None:
        for module in sharded_in(self._roots):
            module.unshard()

    def release(self) -> None:
        """Free whole parameters, and keep what was written to them.

        Their gradients stay, if an accumulation window holds some.
        """
        self.write_back()
        for module in sharded_in(self._roots):
            module.reshard()

    def write_back(self) -> None:
        """Write this rank's rows of whole parameters to its shards.

        Steps and hooks may have written them. A shard that was written meanwhile, through an optimizer's parameters, stays as it is.

        Raises:
            RunError: If a parameter was written whose whole value has another format than its shard.
        """
        if not self._versions or not self.is_whole:
            return
        owns = [local(shard) for shard in self._shards]
        pairs = []
        for (name, whole), own, before in zip(self._parameters, owns, self._versions, strict=True):
            if whole.dtype != own.dtype:
                if before[0] != whole._version:
                    raise RunError(refusal_of_lost_write(name))
            elif before[1] == own._version:
                pairs.append((own, self._rows_of(whole.detach())))
        if pairs:
            kept, rows = ([*column] for column in zip(*pairs, strict=True))
            torch._foreach_copy_(kept, rows)  # pyright: ignore[reportPrivateImportUsage]
        self._note_versions(owns)

    def _note_versions(self, owns: Sequence[Tensor]) -> None:
        """Note how often each whole parameter and each shard were written."""
        pairs = zip(self._parameters, owns, strict=True)
        self._versions = [(whole._version, own._version) for (_, whole), own in pairs]

    def undo(self) -> None:
        """Make the module ready to repeat a step that failed. All ranks call it together."""
        reset_iteration(self._roots, reshards=False)
        self._room = []
        for shard in self._shards:
            shard.grad = None
        self.gather()

    @override
    def absent(self) -> int:
        mask = super().absent()
        self._room = [self._memory(index) for index in range(len(self._parameters))]
        return mask

    @override
    def fill(self, absent: int) -> None:
        super().fill(absent)
        for index, room in enumerate(self._room):
            if room is None:
                self._room[index] = self._memory(index)

    def _memory(self, index: int) -> Tensor | None:
        """Return memory for this rank's rows of a gradient; None if there is no gradient."""
        return None if self._parameters[index][1].grad is None else torch.empty_like(local(self._shards[index]))

    @override
    def average_gradients(self, absent: int) -> None:
        """Give each shard the mean of the ranks' gradients of its rows; free whole gradients and parameters."""
        present = [index for index, (_, whole) in enumerate(self._parameters) if whole.grad is not None]
        present = [index for index in present if not absent >> index & 1]
        scattered = [index for index in present if self._is_scattered(index)]
        summed = [index for index in present if not self._is_scattered(index)]
        shortages: list[str] = []
        with self._beside_backward() as complete:
            for index in reversed(scattered):  # the last parameters have their gradients first
                self._scatter(index, complete)
            try:
                gradients = [gradient for index in summed if (gradient := self._parameters[index][1].grad) is not None]
                scale, like = 1.0 / self._ranks.size, ("rows", absent)
                self._each(gradients, self._ranks.average, scale=scale, like=like, complete=complete)
            except torch.OutOfMemoryError as error:  # all collectives are over
                shortages.append(str(error))
        if not shortages:
            _, reason = caught(partial(self._take_rows, present))
            shortages += [] if reason is None else [reason]
        self._room = []
        for _, whole in self._parameters:
            whole.grad = None
        self.release()
        if shortages:
            raise torch.OutOfMemoryError(shortages[0])

    def _is_scattered(self, index: int) -> bool:
        """Return whether a gradient is large and each rank has as many of its rows."""
        whole = self._parameters[index][1]
        return whole.shape[0] % self._ranks.size == 0 and bytes_of(whole) >= LARGE and whole.is_contiguous()

    def _scatter(self, index: int, complete: Callable[[Sequence[Tensor]], None]) -> None:
        """Write the mean of this rank's rows into its rows of the gradient; the others hold anything afterwards.

        The sum does not go to the rows' own memory, which may be in use until the backward pass ends on the device.
        """
        gradient = self._parameters[index][1].grad
        assert gradient is not None
        complete([gradient])
        with torch.no_grad():
            gradient.mul_(1.0 / self._ranks.size)
        self._ranks.scatter_sum(flat_memory(gradient), flat_memory(self._rows_of(gradient)))

    def _rows_of(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a whole tensor."""
        begin, end = rows_of(tensor.shape[0], rank=self._ranks.rank, ranks=self._ranks.size)
        return tensor[begin:end]

    def _take_rows(self, present: Sequence[int]) -> None:
        for index in present:
            gradient, room, shard = self._parameters[index][1].grad, self._room[index], self._shards[index]
            assert gradient is not None
            assert room is not None
            room.copy_(self._rows_of(gradient))
            if (divisor := self._divisors.get(id(shard))) is not None:  # instead of the number of ranks
                room.mul_(self._ranks.size / divisor)
            shard.grad = as_dtensor(room, shard) if isinstance(shard, DTensor) else room


def bytes_of_whole(module: nn.Module, *, ranks: int) -> int:
    """Return the bytes of whole parameters and gradients beside a rank's shards.

    The shards are those of parameters, gradients, two states of the optimizer, and the copies of an optimizer step.
    """
    held = sum(one.numel() * one.element_size() for one in module.parameters())
    trained = sum(one.numel() * one.element_size() for one in module.parameters() if one.requires_grad)
    return held + trained + (held + 6 * trained) // ranks


def _lacking(words: Sequence[Word]) -> list[Word]:
    """Return what the ranks said that ran out of memory."""
    return [word for word in words if word.outcome is not Outcome.WELL]
