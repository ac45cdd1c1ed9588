"""Exactness checks of ranks that hold shards: all run each check together, on the same rows.

A pass of a sharded module needs all ranks. So the rank that asks for a check sends its batch to the others, and all run the same passes on
it. FSDP2 averages their gradients, which are those of this batch, and leaves each rank its rows of them. The ranks exchange samples of
these rows, so that all compare the same numbers and come to the same decisions.

    CHECK    does a rank ask for a check? One that does sends its batch; those that ask take turns
    GATHER   a vote before each collective, and before samples are exchanged: if one rank runs out of memory, all repeat the trial on
             fewer rows
    CHECK    the findings of all ranks: if one refuses, all do
"""

import io
import random
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_unified.errors import RankError, SplitError
from lightning_unified.hardware.out_of_memory import is_out_of_memory
from lightning_unified.step.exactness.findings import Findings
from lightning_unified.step.exactness.group import CheckGroup, Request
from lightning_unified.step.exactness.losses import LossRule
from lightning_unified.step.ranks.consensus import Outcome, Point, Ranks, Word
from lightning_unified.step.recovery.generators import GeneratorWatch
from lightning_unified.step.recovery.oom import caught
from lightning_unified.step.sharding.kept_shards import KeptShards, refuse_other_collectives

__all__ = ["ShardedChecks"]


class ShardedChecks(CheckGroup):
    """Ranks that run the checks of a sharded module together.

    Args:
        ranks: All ranks.
        shards: What this rank holds during a step.
        device: The device of this rank.
        meet: Meets the other ranks with a number, as a training step does: it raises `MemoryError` if one of them ran out of memory.
    """

    has_whole_parameters = False

    def __init__(
        self, ranks: Ranks, shards: KeptShards, *, device: torch.device, meet: Callable[[int], list[Word]]
    ) -> None:
        self._ranks, self._shards, self._device, self._meet = ranks, shards, device, meet
        self._generators, self._served = GeneratorWatch(device), 0
        self._heard: list[str] = []

    @override
    def next(self, own: Request, *, asks: bool) -> Request | None:
        asking = [word.rank for word in self._meet(int(asks)) if word.digest]
        if not asking:
            return None
        source, self._served = asking[self._served % len(asking)], self._served + 1  # not always the first rank's batch
        is_own = source == self._ranks.rank
        sent = self._ranks.broadcast_object(_packed(own) if is_own else None, source=source)
        if sent is None:
            raise MemoryError(f"rank {source} has no memory to send a batch that is to be checked")
        if isinstance(sent, str):
            raise SplitError(sent)
        request, reason = (own, None) if is_own else caught(partial(_unpacked, sent, own, self._device))
        words = self._ranks.meet(Point.CHECK, Outcome.SHORT if reason else Outcome.WELL, text=reason or "")
        if short := [word for word in words if word.outcome is not Outcome.WELL]:
            raise MemoryError(f"rank {short[0].rank} has no memory for a batch to check: {short[0].text}")
        return request

    @override
    def agreed(self, found: Findings | str | SplitError, rules: Sequence[LossRule]) -> Findings | str:
        self._meet(0)
        said = self._ranks.gathered(_said(found))
        if refusals := [text for kind, text in said if kind == "refused"]:
            raise found if isinstance(found, SplitError) else SplitError(refusals[0])
        if undecided := [text for kind, text in said if kind == "undecided"]:
            return undecided[0]
        everywhere = set.intersection(*(names for _, (names, *_) in said))
        if not everywhere:
            return "the ranks found different loss rules"
        assert isinstance(found, Findings)
        return replace(
            found,
            agreeing=[rule for rule in rules if rule.name in everywhere],
            rejected=set.union(*(rejected for _, (_, rejected, *_) in said)),
            is_thin=any(is_thin for _, (_, _, is_thin) in said),
        )

    @override
    def fits(self, fits: Callable[[int], bool | None]) -> Callable[[int], bool | None]:
        answers = (True, None, False)  # the last that a rank gives decides

        def everywhere(rows: int) -> bool | None:
            return answers[max(word.digest for word in self._meet(answers.index(fits(rows))))]

        return everywhere

    @contextmanager
    @override
    def trial(self) -> Iterator[None]:
        self._heard = []
        states = self._generators.note()
        _seed()
        try:
            yield
            self._hear()
        except RankError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                self._hear()
            elif not self._heard:
                self._ranks.meet(Point.GATHER, Outcome.SHORT, text=str(error))
            raise
        finally:
            self._generators.restore(states)

    @contextmanager
    @override
    def passes(self) -> Iterator[None]:
        collectives = self._shards.collectives
        vote, collectives.vote = collectives.vote, self._vote
        failed = True
        try:
            yield
            failed = False
        except RankError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                self._require_failure_everywhere(error)
            raise
        finally:
            self._shards.leave(failed=failed)
            collectives.vote = vote

    @override
    def anywhere(self, flag: bool) -> bool:
        words = self._hear(int(flag))
        if any(word.digest > 1 for word in words):  # the vote of a collective
            refuse_other_collectives(words)
        return any(word.digest for word in words)

    def _require_failure_everywhere(self, error: Exception) -> None:
        """Raise `RankError` unless the step has failed on all ranks, which run the same rows."""
        mine = zlib.crc32(type(error).__name__.encode())
        words = self._ranks.meet(Point.GATHER, digest=mine)
        if any(word.digest != mine for word in words):
            raise RankError(
                f"the step of rank {self._ranks.rank} failed on rows of a check that other ranks ran ({type(error).__name__}: {error})"
            ) from error

    @override
    def joined(self, samples: list[Tensor]) -> list[Tensor]:
        entries = torch.cat([one.double().cpu() for one in samples]) if samples else torch.zeros(0)
        self._hear()
        of_ranks = self._ranks.gathered((entries, [len(one) for one in samples]))
        parts = [entries.split(lengths) for entries, lengths in of_ranks]
        return [torch.cat(own) for own in zip(*parts, strict=True)]

    def _vote(self, collective: str) -> None:
        refuse_other_collectives(self._hear(zlib.crc32(collective.encode())))

    def _hear(self, digest: int = 0) -> list[Word]:
        """Meet the other ranks within a trial.

        Raises:
            MemoryError: If one of them ran out of memory.
        """
        words = self._ranks.meet(Point.GATHER, digest=digest)
        if short := [word for word in words if word.outcome is not Outcome.WELL]:
            self._heard.append(f"rank {short[0].rank} ran out of memory: {short[0].text}")
            raise MemoryError(self._heard[0])
        return words


def _said(found: Findings | str | SplitError) -> tuple[str, Any]:
    """Return the findings of a rank as plain values: the functions of loss rules cannot be sent."""
    if isinstance(found, SplitError):
        return "refused", str(found)
    if isinstance(found, str):
        return "undecided", found
    return "found", ({rule.name for rule in found.agreeing}, found.rejected, found.is_thin)


def _packed(own: Request) -> bytes | str | None:
    """Return a rank's request for the others.

    The text of a refusal if it cannot be sent, None if memory ran out.
    """
    file = io.BytesIO()
    try:
        torch.save((own.batch, replace(own, kwargs=OrderedDict())), file)
    except Exception as error:  # the batch may hold any object of the user's
        if is_out_of_memory(error):
            return None
        return (
            f'hold="shards" cannot send a batch to the other ranks, which check together that it splits exactly ({type(error).__name__}: {error}). '
            'Let collate_fn return values that pickle can write; or give hold="parameters", or check_split=False.'
        )
    return file.getvalue()


def _unpacked(sent: bytes, own: Request, device: torch.device) -> Request:
    """Return the request of another rank, with its batch on this rank's device."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else torch.serialization.default_restore_location(storage, str(device))

    batch, request = torch.load(io.BytesIO(sent), map_location=place, weights_only=False)
    key = next(iter(own.kwargs))
    return replace(request, kwargs=OrderedDict(own.kwargs, **{key: batch}))


def _seed() -> None:
    """Give all ranks the same random numbers: a step may decide by them which layers it runs."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # the global generator
