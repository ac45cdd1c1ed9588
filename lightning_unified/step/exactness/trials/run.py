"""Run `training_step` and backward on some rows, record all results, and undo the run."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor, nn

from lightning_unified.errors import RankError
from lightning_unified.hardware.out_of_memory import is_out_of_memory
from lightning_unified.nn.module_tree.walks import modules_of
from lightning_unified.step.exactness.draws.constant import ConstantDraws
from lightning_unified.step.exactness.draws.host import equal_host_draws
from lightning_unified.step.exactness.draws.replay import DrawMode, NoDraws
from lightning_unified.step.exactness.facts.graph import graph_near
from lightning_unified.step.exactness.facts.labels import Scoring, scorings
from lightning_unified.step.exactness.facts.progress import Counters, WatchedIndex
from lightning_unified.step.exactness.gradients import GradientSample, sample_gradients
from lightning_unified.step.exactness.group import CheckGroup
from lightning_unified.step.exactness.losses.summands import StepSummands, Summand, scale_summands
from lightning_unified.step.exactness.parameters.earlier_gradients import (
    GradientReadError,
    GradientReads,
    copies_of_gradients,
    put_gradients,
)
from lightning_unified.step.exactness.parameters.formats import has_autocast, precise
from lightning_unified.step.exactness.parameters.used_weights import (
    NotedShards,
    UsedWeights,
    names_of_step,
    used_otherwise,
)
from lightning_unified.step.exactness.trials.refusals import (
    refusal_of_renormed,
    refusal_of_switches,
    refusal_of_updates,
    refusal_of_writes,
)
from lightning_unified.step.exactness.trials.results import Results, aside, copied, is_batch_norm
from lightning_unified.step.exactness.verdict import BatchNormsThatMix, refusal_of_batch_norms, refuse_batch_norm
from lightning_unified.step.recovery.generators import GeneratorWatch
from lightning_unified.step.recovery.renormed import RenormedRows
from lightning_unified.step.recovery.undone_run import (
    Undone,
    draws_or_mixes,
    only_drops,
    parameters_of_optimizers,
    parameters_of_step,
    state_of_step,
)
from lightning_unified.step.results.logs import inside_hook
from lightning_unified.step.results.state.writes import Written, with_backward, written_since
from lightning_unified.step.undo import Noted

__all__ = ["Run", "Runner"]

_FLOAT16_SCALE = 1024.0  # keeps float16 gradients from underflow; divided out again, exactly, in float64


@dataclass(kw_only=True)
class Run(Results):
    """The gradient and results of one run of `training_step` and its backward pass.

    Args:
        gradient: Samples of the gradient.
        loss: The loss, detached; None if the step returned none.
        first_norms: The norms of parameters that the step wrote before it used them, by name.
        moved: The names of trained parameters that the step wrote.
        summands: The summands of the loss, without its graph, if the run was asked for them.
    """

    gradient: GradientSample
    loss: Tensor | None
    first_norms: dict[str, float]
    moved: frozenset[str] = frozenset()
    summands: Sequence[Summand] = ()


class Runner:
    """Runs a module's step and undoes it.

    Args:
        trainer: The Trainer, in `fit`.
        step: Runs `training_step` as the loop does.
        group: The processes that run the step.

    Attributes:
        module: The module whose step runs.
        keeps_autocast: Whether the step runs with autocast, because it fails without it.
        draws_in_eval: Whether the step draws random numbers even with its dropout layers in eval mode.
        draws_in_backward: Whether a backward pass drew other random numbers than the step, as a gradient hook may.
        allows_batch_norm: Whether BatchNorm may mix rows in training; runs then have it in eval mode.
        reads_gradients: Whether the step reads gradients of the batch before.
        counters: The counters of the run's progress that the step reads.
        scorings: How losses of the step score labels.
        summands: Reads the summands of losses.
    """

    def __init__(
        self, trainer: L.Trainer, *, step: Callable[["OrderedDict[str, Any]"], ClosureResult], group: CheckGroup
    ) -> None:
        self._trainer, self._step, self._group = trainer, step, group
        self.module = trainer.lightning_module
        self.keeps_autocast = self.draws_in_eval = self.draws_in_backward = False
        self.allows_batch_norm = self.reads_gradients = self._has_run = False
        self.counters = Counters()
        self.scorings: set[Scoring] = set()
        self._sampled: list[Tensor] = []
        self._first_norms: dict[str, float] = {}
        self._moved: frozenset[str] = frozenset()
        self.summands = StepSummands(self.module)
        self._renormed = RenormedRows()
        self._names: frozenset[str] | None = None  # found once a check: its runs take the same code
        self._state = state_of_step(trainer)

    @property
    def has_dropout(self) -> bool:
        """Whether a layer of the module, in train mode, applies dropout."""
        return any(draws_or_mixes(one) and not is_batch_norm(one) and one.training for one in modules_of(self.module))

    @property
    def has_whole_parameters(self) -> bool:
        """Whether the processes that run the step hold whole parameters."""
        return self._group.has_whole_parameters

    @property
    def hides_code(self) -> bool:
        """Whether a run without dropout may leave out code for training, of modules in eval mode."""
        hidden = (one for one in modules_of(self.module) if one.training and draws_or_mixes(one))
        return not all(is_batch_norm(one) or only_drops(one) for one in hidden)

    def require_known_batch_norm(self) -> None:
        """Raise `SplitError` for BatchNorm in train mode if no run came to its end."""
        if not self.allows_batch_norm and self.anywhere(not self._has_run):
            refuse_batch_norm(self.module)

    def _is_in_eval(self, child: nn.Module, *, is_quiet: bool) -> bool:
        """Return whether a child of the module is in eval mode in a run."""
        return self.allows_batch_norm if is_batch_norm(child) else is_quiet and draws_or_mixes(child)

    def _refuse(self, norms: BatchNormsThatMix) -> None:
        """Raise `SplitError` if BatchNorm layers mixed rows in a run and may not."""
        if self.allows_batch_norm:
            return
        if norms.has_layers and self.anywhere(bool(norms.names)):
            raise refusal_of_batch_norms(type(self.module).__name__, norms.names or ["on another rank"])
        self._has_run = True

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return self._trainer.strategy.root_device

    def release(self) -> None:
        """Drop what runs have found and copied."""
        self._names = None
        self._state.release()

    def run(
        self,
        kwargs: "OrderedDict[str, Any]",
        batch: Any,
        draws: DrawMode,
        *,
        factor: float = 1.0,
        only: str | None = None,
    ) -> Run:
        """Run the step on `batch`, run the backward pass of its loss, and undo both.

        From the first run on whose step reads gradients of the batch before, it finds copies of them.

        Args:
            kwargs: The arguments of `training_step`, the batch first.
            batch: The batch for the step. Its tensors are copied, because a step may write them in place.
            draws: The mode that records or replaces random draws.
            factor: The factor of the loss in the backward pass; the gradient is divided by it.
            only: The summand of the loss that the backward pass differentiates; empty for all. None reads no summands.
        """
        try:
            return self._run(kwargs, batch, draws, factor=factor, only=only)
        except GradientReadError:
            self.reads_gradients = True
        draws.restart()
        return self._run(kwargs, batch, draws, factor=factor, only=only)

    def _run(
        self, kwargs: "OrderedDict[str, Any]", batch: Any, draws: DrawMode, *, factor: float, only: str | None
    ) -> Run:
        results, earlier = self._trainer.fit_loop.epoch_loop._results, self._earlier_gradients()
        own = copied(batch)
        in_eval = partial(self._is_in_eval, is_quiet=isinstance(draws, NoDraws))
        norms, self._renormed = BatchNormsThatMix(self.module), RenormedRows()
        undone = aside(self._trainer, results, draws, in_eval=in_eval, state=self._state, renormed=self._renormed)
        with self._precise(), undone as block:
            parameters = parameters_of_step(self._trainer)
            put_gradients(parameters, earlier or [None] * len(parameters))
            scale = factor * (_FLOAT16_SCALE if any(one.dtype == torch.float16 for one in parameters) else 1.0)
            shards = None if self._group.has_whole_parameters else NotedShards(parameters)
            with norms, self._group.passes(), torch.enable_grad():
                result, stepped, summands = self._differentiated(
                    kwargs, own, draws, parameters, scale=scale, noted=block.noted, only=only
                )
            self._refuse(norms)
            after = None if shards is None else shards.written
            if self.anywhere(after is not None):
                name = "rows of another rank" if after is None else self._named(after)
                raise refusal_of_writes(type(self.module).__name__, name)
            self._sampled = [one for one in parameters if one.requires_grad]  # the step may have frozen some
            gradient = sample_gradients(self._sampled, scale=scale, joined=self._group.joined)
            results = block.gather(result.extra)
            results.written = with_backward(results.written, stepped)
            return Run(
                gradient=gradient,
                loss=result.loss,
                first_norms=self._first_norms,
                moved=self._moved,
                summands=summands,
                **vars(results),
            )

    def _earlier_gradients(self) -> list[Tensor | None]:
        """Return copies of the gradients of the batch before, if the step reads them; else none."""
        return copies_of_gradients(parameters_of_step(self._trainer)) if self.reads_gradients else []

    def _differentiated(
        self,
        kwargs: "OrderedDict[str, Any]",
        batch: Any,
        draws: DrawMode,
        parameters: Sequence[Tensor],
        *,
        scale: float,
        noted: Noted,
        only: str | None,
    ) -> tuple[ClosureResult, Written, Sequence[Summand]]:
        key = next(iter(kwargs))
        own = OrderedDict(kwargs, **{key: batch})
        if "batch_idx" in own:
            own["batch_idx"] = WatchedIndex(own["batch_idx"], self.counters)
        self._names = names_of_step(self.module) if self._names is None else self._names
        used = UsedWeights(self.module, is_whole=self._group.has_whole_parameters, named=self._names)
        watches = self._group.has_whole_parameters and not self.reads_gradients
        reads = GradientReads(parameters) if watches else nullcontext()
        scalars = nullcontext() if only is None else self.summands.noting()
        with used, draws, self.counters.watching(), reads, scalars:
            result = self._step(own)
        if (switched := used.switched) is not None:
            raise refusal_of_switches(type(self.module).__name__, self._named(switched))
        self._first_norms = {self._named(parameter): norm for parameter, norm in used.first_norms}
        stepped = written_since(noted)
        for parameter in parameters:  # as Lightning's zero_grad, between the step and the backward pass
            parameter.grad = None
        loss, summands = result.closure_loss, ()
        if loss is not None and loss.requires_grad:
            summands = () if only is None else self._chosen(loss, only)
            self.scorings |= scorings(graph_near(loss)[1])
            if (renormed := used_otherwise(loss, filter(self._renormed.wrote, parameters))) is not None:
                raise refusal_of_renormed(type(self.module).__name__, self._named(renormed))
            versions = [parameter._version for parameter in parameters]
            watch = draws if draws.covers_backward else NoDraws(GeneratorWatch(self.device).note)
            with watch, inside_hook(self.module, "backward"):
                self.module.backward(loss * scale)
            self.draws_in_backward |= isinstance(watch, NoDraws) and watch.has_drawn
            written = [one for one, version in zip(parameters, versions, strict=True) if one._version != version]
            if written:
                raise refusal_of_updates(type(self.module).__name__, self._named(written[0]))
        result.closure_loss = None
        if (after := used.written) is not None:
            raise refusal_of_writes(type(self.module).__name__, self._named(after))
        own = set(map(id, parameters_of_optimizers(self._trainer)))  # what a step writes to others is state, and undone
        moved = (one for one in used.moved if id(one) in own and not self._renormed.wrote(one))
        self._moved = frozenset(map(self._named, moved))
        return result, stepped, summands

    def _chosen(self, loss: Tensor, only: str) -> Sequence[Summand]:
        """Let the next backward pass differentiate one summand of a loss alone, and return all, without its graph."""
        found = self.summands.of(loss)
        if only:
            scale_summands(found, [float(one.key == only) for one in found])
        return [replace(one, places=[], nodes=[]) for one in found]

    def without_gradients(
        self, kwargs: "OrderedDict[str, Any]", batch: Any, *, reads_summands: bool = False
    ) -> tuple[Tensor | None, Results, Sequence[Summand]]:
        """Run the step without a backward pass and dropout, undo it, and return its loss and results.

        What the step draws all the same is constant. The step has a graph only if the summands of its loss are read too.
        """
        collection, own = self._trainer.fit_loop.epoch_loop._results, copied(batch)
        earlier = self._earlier_gradients()
        draws: DrawMode = ConstantDraws() if self.draws_in_eval else NoDraws(GeneratorWatch(self.device).note)
        with ExitStack() as stack:
            if self.draws_in_eval:
                stack.enter_context(equal_host_draws(self.module))
            stack.enter_context(self._precise())
            in_eval = partial(self._is_in_eval, is_quiet=True)
            block = stack.enter_context(aside(self._trainer, collection, draws, in_eval=in_eval, state=self._state))
            put_gradients(parameters_of_step(self._trainer) if earlier else (), earlier)
            norms = BatchNormsThatMix(self.module)
            scalars = self.summands.noting() if reads_summands else nullcontext()
            with norms, self._group.passes(), torch.set_grad_enabled(reads_summands), draws, scalars:
                result = self._step(OrderedDict(kwargs, **{next(iter(kwargs)): own}))
            self._refuse(norms)
            loss, result.closure_loss = result.closure_loss, None
            summands = self._chosen(loss, "") if reads_summands and loss is not None else ()
            return None if loss is None else loss.detach(), block.gather(result.extra), summands

    def failure(self, kwargs: "OrderedDict[str, Any]") -> BaseException | None:
        """Return the error of the step on the whole batch without gradients; None without one.

        None also if memory runs out.
        """
        key, batch = next(iter(kwargs.items()))
        own = copied(batch)
        undone = Undone(self._trainer, in_eval=partial(self._is_in_eval, is_quiet=False))
        try:
            with undone, self._group.passes(), torch.no_grad():
                self._step(OrderedDict(kwargs, **{key: own}))
        except RankError:
            raise
        except Exception as error:
            return None if is_out_of_memory(error) else error
        return None

    def anywhere(self, flag: bool) -> bool:
        """Return whether `flag` is set in one of the processes that run the step."""
        return self._group.anywhere(flag)

    def name_of(self, index: int) -> str:
        """Return the name of the parameter whose gradient has the given index."""
        return self._named(self._sampled[index])

    def _named(self, parameter: Tensor) -> str:
        names = (name for name, one in self.module.named_parameters() if one is parameter)
        return next(names, "a parameter of the optimizer")

    @property
    def leaves_out_autocast(self) -> bool:
        """Whether the check runs the step without autocast, although it trains with autocast."""
        return has_autocast(self._trainer) and not self.keeps_autocast

    def _precise(self) -> AbstractContextManager[None]:
        return precise(self._trainer, keeps_autocast=self.keeps_autocast)
