"""Meetings of ranks over their own sockets: all ranks continue, or all stop."""

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from lightning_unified.errors import RankError

__all__ = ["Outcome", "Point", "Ranks", "Word"]

_ROLL_CALL_S = 3.0  # judgement: seconds in which the remaining ranks must answer once one is missing
_RECORD = struct.Struct("<BBId")  # point, outcome, digest, terms; the mask of absent gradients follows


class Point(IntEnum):
    """The points of a run at which ranks meet.

    If ranks meet at different points, they took different paths.
    """

    ENVIRONMENT = 1
    MODULE = 2
    READY = 3
    GRADIENTS = 4
    FILLED = 5
    BEFORE_WEIGHTS = 6
    AFTER_WEIGHTS = 7
    RESYNC = 8
    SIZES = 9
    DECISION = 10
    PLAN = 11
    GATHER = 12
    UPDATE = 13
    MICRO_BATCHES = 14
    SAVING = 15
    CHECK = 16


class Outcome(IntEnum):
    """How the work of a rank before a meeting ended."""

    WELL = 0
    SHORT = 1
    """Memory ran out, and everything can be undone."""
    WRITTEN = 2
    """Memory ran out while weights were written."""
    FAILED = 3
    """Another error; the rank stops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """The record that one rank sends to a meeting.

    Attributes:
        rank: The sender.
        point: The meeting point it reached.
        outcome: How its work before the meeting ended.
        digest: A number that should be equal on all ranks; 0 for none.
        terms: Loss terms in its accumulation window.
        absent: Its parameters without a gradient, a bit each.
        text: The reason, if the outcome is not `WELL`.
    """

    rank: int
    point: int
    outcome: Outcome
    digest: int
    terms: float
    absent: int
    text: str = ""


class Ranks:
    """The ranks of a run, which meet at fixed points. All ranks create this object together.

    Meetings run over a separate group of sockets (gloo). They need no device memory, do not wait for the device's
    pending work, and cannot be confused with a collective of the module.

    Args:
        timeout: How long a rank waits for the others at a meeting; None for torch's own.

    Attributes:
        rank: The number of this rank.
        size: The number of ranks.
        are_apart: Whether ranks are in a section of the step that each rank runs, and may repeat, by itself.
        is_over: Whether all ranks stop; no further meeting is possible.
        are_real: Whether collectives run; they do not in a dry run.
    """

    are_real = True

    def __init__(self, *, timeout: timedelta | None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.are_apart = False
        self._timeout = timeout
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))
        self.is_over = False
        self.expect(parameters=0)

    @property
    def sockets(self) -> dist.ProcessGroup:
        """The group of sockets (gloo) over which the ranks meet."""
        return self._group

    def expect(self, *, parameters: int) -> None:
        """Reserve bits for a mask of `parameters` parameters in later records."""
        self._mask_bytes = -(-parameters // 8)
        self._table = torch.zeros(self.size, _RECORD.size + self._mask_bytes, dtype=torch.uint8)

    def meet(
        self,
        point: Point,
        outcome: Outcome = Outcome.WELL,
        *,
        text: str = "",
        digest: int = 0,
        terms: float = 0.0,
        absent: int = 0,
    ) -> list[Word]:
        """Wait for all ranks, and return the record of each, in rank order.

        Raises:
            RankError: If another rank failed, is gone, or reached another point.
        """
        record = _RECORD.pack(point, outcome, digest, terms) + absent.to_bytes(self._mask_bytes, "little")
        self._table.zero_()
        self._table[self.rank] = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        with self.losses_named():
            dist.all_reduce(self._table, group=self._group)
            words = [self._word(rank) for rank in range(self.size)]
            if any(word.outcome is not Outcome.WELL for word in words):
                words = [self._word(rank, said) for rank, said in enumerate(self.gathered(text))]
        if outcome is not Outcome.FAILED:
            self._raise_if_over(words)
        return words

    def most(self, value: int) -> int:
        """Return the largest `value` of all ranks, each from 0 to 2**32 - 1; all ranks call it together."""
        return max(word.digest for word in self.meet(Point.DECISION, digest=value))

    def exchange(self, point: Point, value: Any) -> list[Any]:
        """Meet, and return the `value` of each rank. It is pickled, so use it for rare values."""
        self.meet(point)
        return self.gathered(value)

    def gathered(self, value: Any) -> list[Any]:
        """Return the `value` of each rank, after a meeting of all ranks. It is pickled."""
        values: list[Any] = [None] * self.size
        with self.losses_named():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast_object(self, value: Any, *, source: int) -> Any:
        """Return the `value` of rank `source` on every rank."""
        box = [value]
        with self.losses_named():
            dist.broadcast_object_list(box, source, group=self._group)
        return box[0]

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Write rank `source`'s `tensor` into this rank's, on any device."""
        with self.losses_named():
            dist.broadcast(tensor, source, group=self._group if tensor.device.type == "cpu" else None)

    def average(self, tensor: Tensor) -> None:
        """Sum the ranks' `tensor` in place; each rank has divided its own by the number of ranks."""
        with self.losses_named():
            dist.all_reduce(tensor)

    def scatter_sum(self, tensor: Tensor, own: Tensor) -> None:
        """Write this rank's part of the sum of the ranks' `tensor` into `own`.

        `tensor` has equal parts for all ranks.
        """
        with self.losses_named():
            dist.reduce_scatter_tensor(own, tensor)

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Report an error inside the block at the next meeting, so that no rank waits for this one."""
        try:
            yield
        except Exception as error:
            if not self.is_over:
                first_line = (str(error).splitlines() or [""])[0]
                self.is_over = True
                with suppress(RankError):
                    self.meet(Point.READY, Outcome.FAILED, text=f"{type(error).__name__}: {first_line}")
            raise

    def end(self) -> None:
        """End all meetings: every rank stops with an error of its own."""
        self.is_over = True

    def _word(self, rank: int, text: str = "") -> Word:
        record = bytes(self._table[rank].tolist())
        point, outcome, digest, terms = _RECORD.unpack_from(record)
        absent = int.from_bytes(record[_RECORD.size :], "little")
        return Word(
            rank=rank, point=point, outcome=Outcome(outcome), digest=digest, terms=terms, absent=absent, text=text
        )

    def _raise_if_over(self, words: list[Word]) -> None:
        failed = [word for word in words if word.outcome is Outcome.FAILED]
        if failed:
            self.is_over = True
            raise RankError(
                f"{'; '.join(f'rank {word.rank} failed: {word.text}' for word in failed)} [rank {self.rank} stops with it; go on from the "
                "last checkpoint]",
                failed=tuple(word.rank for word in failed),
            )
        # a rank that ran out of memory does not know how far the others have come
        if len({word.point for word in words if word.outcome is Outcome.WELL}) > 1:
            self.is_over = True
            where = ", ".join(f"rank {word.rank} {Point(word.point).name.lower()}" for word in words)
            raise RankError(
                f"the ranks came to different points of the run ({where}): they must train the same number of batches and of closures "
                "of their optimizer. Give each rank as many batches (DistributedSampler does), and no optimizer that decides by its "
                "own loss how often it runs, such as LBFGS."
            )

    @contextmanager
    def losses_named(self) -> Iterator[None]:
        """Turn the failure of a collective inside the block into an error that names the missing ranks.

        Raises:
            RankError: If the collective failed.
        """
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            self.is_over = True
            missing = self._missing()
            if not missing:
                raise RankError(f"a collective failed on rank {self.rank} or on one that shares it: {error}") from error
            raise RankError(
                f"no answer from rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}: a process that is gone, or that did not "
                f"come to where rank {self.rank} waits for it ({self._timeout or 'for as long as torch waits'}). Its own output says "
                "why; go on from the last checkpoint.",
                missing=tuple(missing),
            ) from error

    def _missing(self) -> list[int]:
        """Return the ranks that do not answer over the store within a few seconds.

        The store works where the sockets of the meetings have failed.
        """
        dist.destroy_process_group(self._group)  # closes the sockets, so that ranks that still wait there fail too
        deadline = time.monotonic() + _ROLL_CALL_S
        missing = [rank for rank in range(self.size) if rank != self.rank]
        try:
            store = _get_default_store()
            store.set(f"lightning_unified/here/{self.rank}", "yes")
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not store.check([f"lightning_unified/here/{rank}"])]
                time.sleep(0.05)
        except RuntimeError:
            return [0]  # rank 0 keeps the store
        return missing
