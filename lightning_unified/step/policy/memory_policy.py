"""What one run does about memory: how its batches are split, and what follows when memory runs out or is about to."""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

import lightning as L
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_unified.cost_model import describe_bytes, describe_shortage, metal_heap_bytes, static_bytes
from lightning_unified.errors import BudgetError, ConfigurationError, OutOfMemoryError, SplitError
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.options import AppliedOptions
from lightning_unified.options.activation_checkpointing import ActivationCheckpointing
from lightning_unified.step.exactness.losses import LossRule, declared
from lightning_unified.step.exactness.verdict import Verdict, batch_norms_of, refuse_batch_norm
from lightning_unified.step.recovery.budget_watch import BudgetWatch
from lightning_unified.step.recovery.cache_care import CacheCare
from lightning_unified.step.recovery.kept import KeptMemory
from lightning_unified.step.recovery.oom import requested_bytes
from lightning_unified.step.recovery.sizes import MicroBatchSize
from lightning_unified.step.recovery.sizes_file import SizesFile, fingerprint
from lightning_unified.step.split import BatchShape, BatchSplitter, positions
from lightning_unified.step.split.roles import Roles
from lightning_unified.step.split.rules import LEFT_BEHIND, can_be_pickled, rules_of
from lightning_unified.units import format_bytes

__all__ = ["MemoryPolicy"]

log = logging.getLogger("lightning_unified")

_EVALUATIONS = {"validation": "validate", "test": "test", "predict": "predict"}  # the stage of each phase


class MemoryPolicy:
    """Decides for a strategy, on what the step, the callbacks and the budget tell it.

    Args:
        watch: The budget and what is used of it.
        micro_batch_size: The largest number of rows run at once, or `"auto"`.
        evaluation_micro_batch_size: The same for validation, test and predict.
        recover: Whether a step that ran out of memory is undone and repeated.
        optimizer_rollback: Whether weights and optimizer state are copied around each optimizer step.
        micro_batches: Rules for the module's batches, in place of those that it declares; None for its own.
        batch_norm: What to do with BatchNorm in train mode when a batch must be split, unless the rules say: `"refuse"` or `"micro"`.
        check_split: Whether the exactness check compares whole and split rows, unless the rules say.
        window_mean: Over what an accumulation window's gradient is a mean: its `"batches"` or their loss `"terms"`.
        remember: File for the sizes found, or None.

    Attributes:
        caches: What clears the device's caches between batches.
        recomputation: Whether activations are recomputed; `"auto"` turns that on once nothing smaller is left to try.
        memory options: What else a plan can pull: the optimizer's kernel, the rows of a chunked loss.
        sizes: The micro-batch size in use in training.
        evaluation_sizes: The one in use in validation, test and predict.
        effective_batch_size: Rows of the largest batch so far.
        known_roles: Roles of the batches' entries by stage, where another run has found them: that of a dry run.
        recoveries: How many steps were repeated.
        most_chunks: Chunks of an encoder's call that a dry run executes; None for all of them.
        events: What was decided on the way, for people.

    Raises:
        ConfigurationError: If an argument is not one of those named.
    """

    def __init__(
        self,
        watch: BudgetWatch,
        *,
        micro_batch_size: int | Literal["auto"],
        evaluation_micro_batch_size: int | Literal["auto"],
        recover: bool,
        optimizer_rollback: bool,
        micro_batches: MicroBatchRules | None = None,
        batch_norm: Literal["refuse", "micro"],
        check_split: bool,
        window_mean: Literal["batches", "terms"],
        remember: str | None,
    ) -> None:
        if batch_norm not in ("refuse", "micro"):
            raise ConfigurationError(f'batch_norm={batch_norm!r}: give "refuse" or "micro".')
        if window_mean not in ("batches", "terms"):
            raise ConfigurationError(f'window_mean={window_mean!r}: give "batches" or "terms".')
        if micro_batches is not None and not isinstance(micro_batches, MicroBatchRules):
            raise ConfigurationError(
                f"micro_batches={micro_batches!r}: give MicroBatchRules(...) from lightning_unified."
            )
        self.watch = watch
        self.given_rules: MicroBatchRules | None = micro_batches
        self._rules: dict[str, MicroBatchRules] = {}
        self._splitters: dict[str, BatchSplitter] = {}
        self.known_roles: dict[str, Roles] = {}
        self.caches = _caches_of(watch)
        self.recomputation = ActivationCheckpointing("auto")
        self.memory_options = AppliedOptions()
        self.kept = KeptMemory()
        self.sizes = MicroBatchSize(micro_batch_size)
        self.evaluation_sizes = MicroBatchSize(evaluation_micro_batch_size)
        self.recover = recover
        self.optimizer_rollback = optimizer_rollback
        self._check_split = check_split
        self.mean_of_terms = window_mean == "terms"
        self.recoveries = 0
        self.most_chunks: int | None = None
        self.events: list[str] = []
        self._file = SizesFile(remember)
        self._asked_size = micro_batch_size
        self._batch_norm = batch_norm
        self._changed_by = ""
        self._module: L.LightningModule | None = None
        self._optimizers: list[Optimizer] = []
        self._largest: BatchShape | None = None
        self._fingerprint: dict[str, Any] = {}
        self._forget()

    def _forget(self) -> None:
        self._verdict: Verdict | None = None
        self._said: set[str] = set()
        self._refusal: SplitError | None = None
        self._before_watch: dict[str, Any] | None = None
        self._before_failure: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process keeps: the options and what happened. The objects of one fit stay behind."""
        given = self.given_rules if can_be_pickled(self.given_rules) else LEFT_BEHIND
        objects = {
            "_module": None,
            "_optimizers": [],
            "_rules": {},
            "_splitters": {},
            "_verdict": None,
            "_refusal": None,
            "caches": None,
        }
        return {**vars(self), **objects, "given_rules": given, "kept": KeptMemory()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state over, with caches of the copy's own."""
        vars(self).update(state, caches=_caches_of(state["watch"]))

    def refuse_if_too_small(self, module: L.LightningModule, optimizers: Iterable[Optimizer]) -> None:
        """Raise `BudgetError` if the budget cannot even hold what `module` needs before any activation."""
        self._module, self._optimizers = module, list(optimizers)
        need = static_bytes(module, self._optimizers)
        budget = self.watch.budget
        if budget is None:
            return
        given = f"a budget of {format_bytes(budget.bytes)} ({budget.spec}) cannot hold {type(module).__name__}"
        if sum(need.values()) > budget.bytes:
            raise BudgetError(
                f"{given}: {describe_bytes(need)}, "
                f"before any activation. Give a budget well above {format_bytes(sum(need.values()))}, or train a smaller model."
            )
        heaps = metal_heap_bytes(module) if self.watch.device.type == "mps" else 0
        if heaps > budget.bytes:
            raise BudgetError(
                f"{given}: Metal keeps its weights of {format_bytes(need['weights'])} in heaps of {format_bytes(heaps)} together, one of 1 GiB "
                f"for tensors of 10 MiB and more. Give a budget well above {format_bytes(heaps)}, or train a smaller model."
            )

    def begin(self, module: L.LightningModule, optimizers: list[Optimizer], *, precision: str) -> None:
        """Begin a fit or an evaluation: what was found out about another module is forgotten."""
        self._module, self._optimizers = module, optimizers
        self._largest = None
        self._forget()
        self.watch.begin()
        self.caches.begin(self.watch.device)
        self.kept.begin(module)
        self._rules, self._splitters = {}, {}
        unit, name = self.rules("fit").unit, type(module).__name__
        least = 2 if any(isinstance(child, _BatchNorm) for child in module.modules()) else 1
        self.sizes.keep_together(unit, least=least, whose=name)
        self.evaluation_sizes.keep_together(unit, whose=name)
        self._fingerprint = fingerprint(module, self.watch, precision=precision, recompute=self.recomputation.on)
        self.load_sizes_state(self._file.read(self._fingerprint))

    def rules(self, stage: str) -> MicroBatchRules:
        """Return the rules for batches of `stage` (`"fit"`, `"validate"`, `"test"`, `"predict"`); the module is asked once a fit."""
        if stage not in self._rules:
            self._rules[stage] = rules_of(self._module, stage, given=self.given_rules)
        return self._rules[stage]

    def checks(self, stage: str) -> bool:
        """Return whether the exactness check compares split and whole batches of `stage`."""
        own = self.rules(stage).check
        return self._check_split if own is None else own

    def runs(self, module: Any) -> bool:
        """Return whether `module` is the one that the run is about."""
        return self._module is not None and module is self._module

    def splitter(self, stage: str) -> BatchSplitter:
        """Return what splits the batches of `stage`; one for the whole fit, so that all agree on what its rows are."""
        assert self._module is not None
        if stage not in self._splitters:
            roles = self.known_roles.get(stage)
            self._splitters[stage] = BatchSplitter(self._module, self.rules(stage), stage=stage, roles=roles)
        return self._splitters[stage]

    @property
    def check_split(self) -> bool:
        """Whether it does in training."""
        return self.checks("fit")

    @property
    def effective_batch_size(self) -> int | None:
        """Rows of the largest batch so far; None before the first batch is done."""
        return None if self._largest is None else self._largest.rows

    @property
    def micro_batch_size(self) -> int | None:
        """Rows of an effective batch that go through forward and backward at once; None before the first batch is done."""
        return None if self._largest is None else self.sizes.at_once(self._largest)

    @property
    def size_reason(self) -> str:
        """Why the micro-batch is as large as it is."""
        reason = "as asked" if self._asked_size != "auto" else "the whole batch"
        return f"{reason}, then {self._changed_by}" if self._changed_by else reason

    @property
    def weighting_reason(self) -> str:
        """By what micro-batches are weighted, and how that is known."""
        if self._verdict is not None:
            return self._verdict.reason
        if self._module is not None and self.rules("fit").encoders:
            return "the loss is the whole batch's own; encoders run in chunks of rows"
        return "no batch has been cut" if self.check_split else "as declared, else rows; unchecked (check_split=False)"

    @property
    def loss_rule(self) -> LossRule:
        """By what micro-batches are weighted: as declared, as gradients have told, else by rows."""
        own = declared(self.rules("fit"))
        return own or (LossRule("rows") if self._verdict is None else self._verdict.rule)

    @property
    def splits_are_exact(self) -> bool:
        """Whether gradients have told that a batch's parts come to the whole."""
        return self._verdict is not None and self._verdict.conclusive

    def allow_split(self, shape: BatchShape) -> None:
        """Raise `SplitError` if the module says, or shows, that such a batch cannot be cut exactly."""
        module = self._module
        assert module is not None
        if self._refusal is not None:
            raise self._refusal
        rules = self.rules("fit")
        if not rules.splittable:
            raise SplitError(
                f"the rules of {type(module).__name__} say splittable=False and its batch of {shape.rows} rows must run in parts of "
                f"{self.sizes.at_once(shape)}; raise the budget or the micro-batch size, or use a smaller batch."
            )
        if (rules.batch_norm or self._batch_norm) == "refuse":
            refuse_batch_norm(module, rows=shape.rows, within=rules.encoders)
        elif batch_norms_of(module):
            self._say(
                'BatchNorm\'s statistics are those of micro-batches where a batch is split, as batch_norm="micro" accepts.',
                log.info,
            )

    def split_checked(self, verdict: Verdict) -> None:
        """Note what the exactness check has found; say by what micro-batches are weighted where that was not declared or not checked,
        which random draws differ from the whole batch's, and which results nothing puts together.

        What the check's few rows took is given back, or a GPU's first step would be laid out around it: that took up to a tenth more.
        """
        if verdict is self._verdict:
            return
        if self.watch.device.type != "cpu":
            self.watch.release()
        if not verdict.conclusive and (self._verdict is None or self._verdict.conclusive):
            log.warning("Micro-batches are weighted by %s.", verdict.reason)
        before = None if self._verdict is None else (self._verdict.rule.name, self._verdict.conclusive)
        if (verdict.rule.name, verdict.conclusive) != before and (
            not verdict.conclusive or verdict.rule.name != "rows"
        ):
            self.events.append(f"micro-batches weighted by {verdict.reason}")
        if verdict.noise:
            self._say(verdict.noise, log.warning if "compared without" in verdict.noise else log.info)
        self.say_unmergeable(verdict.unmergeable, phase="training")
        for path in verdict.left:
            self._say(f"{path} is written once a micro-batch of a split batch, not once a batch.", log.warning)
        self._verdict = verdict

    def say_unmergeable(self, names: Iterable[str], *, phase: str) -> None:
        """Warn of values that nothing puts together, each name once."""
        for name in names:
            self._say(
                f"{name!r}, logged or returned by {phase}_step, is not the whole batch's where a batch is split: nothing puts the "
                "micro-batches' values together. Compute it once an epoch, or give a rule in MicroBatchRules(merge=MergeRules(...)).",
                log.warning,
            )

    def say_drawn(self, names: Iterable[str], *, phase: str) -> None:
        """Warn once that an evaluation draws random numbers for each micro-batch, which its results depend on.

        Args:
            names: Of what it logs.
            phase: `"validation"`, `"test"` or `"predict"`.
        """
        logged = ", ".join(repr(name) for name in sorted(names))
        self._say(
            f"random draws of {phase}_step are made for each micro-batch, not for the whole batch: what it returns"
            f"{f' and logs ({logged})' if logged else ''} differs as with another seed.",
            log.warning,
        )

    def say_once_a_part(self, what: str, instead: str) -> None:
        """Warn once of something that happens once for each micro-batch of a split batch.

        Args:
            what: Happens.
            instead: What to do to have it happen once a batch.
        """
        self._say(f"{what} once for each micro-batch where a batch is split. {instead}", log.warning)

    def _say(self, words: str, how: Callable[..., None]) -> None:
        if words not in self._said:
            self._said.add(words)
            self.events.append(words)
            how("%s", words[:1].upper() + words[1:])

    def runs_whole(self, refusal: SplitError) -> bool:
        """Return whether a batch that may not be cut runs whole: if only the watch over the budget wanted it smaller, or if it now
        needs less because activations are recomputed.
        """
        before = self._before_failure
        if self._verdict is not None:
            return False  # batches have been split already, some perhaps inexactly: the run stops
        if before is not None and self.recompute_more():
            self.sizes.load_state_dict(before)
            self._refusal, self._before_failure, self._changed_by = refusal, None, ""
            log.warning("%s It goes on with its batches whole.", refusal)
            return True
        if self._before_watch is None:
            return False
        self.sizes.load_state_dict(self._before_watch)
        self._refusal, self._before_watch, self._changed_by = refusal, None, ""
        self.events.append("its batches cannot be cut exactly, so it goes on with them whole")
        log.warning("%s %s", refusal, self.events[-1])
        return True

    def note_unsplit(self, option: str, why: str) -> None:
        """Say once why batches are not split, and warn where a size was asked for.

        Args:
            option: `"micro_batch_size"` or `"evaluation_micro_batch_size"`.
            why: A sentence on the batches.
        """
        if why not in self.events:
            self.events.append(why)
            asked = (self.sizes if option == "micro_batch_size" else self.evaluation_sizes).asked
            if asked is not None:
                log.warning("%s=%s has no effect: %s", option, asked, why)

    def out_of_memory(
        self, *, phase: str, reason: str, shape: BatchShape | None, attempt: int, batch: Any = None
    ) -> None:
        """Free memory and choose a smaller size for the batch that failed.

        Args:
            phase: What ran: `"forward"`, `"backward"`, `"optimizer step"`, `"prepare"`, `"validation"`, ….
            reason: The allocator's words.
            shape: Of the batch; None for what cannot be cut.
            attempt: How often it has failed, from 1 on.
            batch: The batch, to say what of it did not fit.

        Raises:
            OutOfMemoryError: If nothing smaller is left to try and it has failed with cleared caches too.
        """
        self.kept.give_back(for_good=phase != "prepare")  # what is kept is made there
        self.watch.release()
        reason = self.watch.named(reason)
        evaluates = phase in _EVALUATIONS
        sizes = self.evaluation_sizes if evaluates else self.sizes
        failed = None if shape is None else sizes.at_once(shape)
        can_be_cut = not evaluates or self.rules(_EVALUATIONS[phase]).splittable
        trains = phase in ("forward", "backward")
        if self._verdict is None and trains and self._before_failure is None:
            self._before_failure = sizes.state_dict()
        recomputes = trains and shape is not None and self.refuses_cut(shape) and self.recompute_more()
        shrunk = (
            not recomputes and shape is not None and can_be_cut and sizes.failed(shape, room_bytes=self.watch.room())
        )
        recomputes = recomputes or (trains and not shrunk and attempt > 1 and self.recompute_more())
        if not shrunk and not recomputes and attempt > 1:
            lengths = set() if shape is None else positions(batch, shape.rows)
            raise OutOfMemoryError(self._shortage(phase, reason, failed, lengths))
        self.recoveries += 1
        what_next = f"with {sizes.at_once(shape)} at once" if shrunk and shape is not None else "after clearing caches"
        if recomputes:
            what_next = f"with activations recomputed ({self.recomputation.reason})"
        size = "the whole batch" if failed is None else f"{failed} rows at once"
        told = f"out of memory in {phase} with {size}; repeated {what_next}"
        if shrunk and not evaluates:
            self._changed_by = f"smaller: {told}"
        self._before_watch = None
        self.events.append(told)
        log.warning("Memory ran out in %s with %s (%s). It is repeated %s.", phase, size, reason, what_next)
        self._remember()

    def recompute_more(self, why: str = "because memory ran out") -> bool:
        """Recompute activations from here on, if that was left open; sizes are then found anew, for a step needs less.

        Args:
            why: For people.

        Returns:
            Whether it could be done and is new.
        """
        done = self.recomputation.more(why)
        if done:
            self.sizes.start_over()
        return done

    def refuses_cut(self, shape: BatchShape) -> bool:
        """Return whether such a batch cannot be cut exactly, as far as is known."""
        try:
            self.allow_split(shape)
        except SplitError:
            return True
        return False

    def _shortage(self, phase: str, reason: str, rows: int | None, lengths: set[int]) -> str:
        assert self._module is not None
        return describe_shortage(
            self._module,
            self._optimizers,
            budget_bytes=self.watch.bytes,
            phase=phase,
            reason=reason,
            rows=rows,
            requested=requested_bytes(reason),
            positions=lengths,
            recomputes=bool(self.recomputation.on),
        )

    def batch_done(self, shape: BatchShape | None) -> None:
        """Learn from a batch that went well, and see whether the process has outgrown its budget or may use more of it."""
        if not self.kept.may_be_recorded:
            self.events.extend(self.caches.batch_done(self.watch.bytes))
        if (followed := self.watch.follow()) is not None:
            self.events.append(followed)
            log.info("%s", followed)
        if shape is not None:
            if self._largest is None or shape.rows >= self._largest.rows:
                self._largest = shape
            self.sizes.worked(shape)
            if self.sizes.is_due and self.sizes.forgive(self.watch.room()):
                self._grown("more memory is available than when it ran out")
        overrun = self.watch.overrun() if self._largest is not None else None
        if overrun is not None and self._smaller(overrun, has_failed=True):
            self.watch.count_anew()

    def shrink(self, reason: str) -> bool:
        """Halve the micro-batch from the next batch on, before memory runs out.

        Args:
            reason: Why, for people.

        Returns:
            Whether it could be done: not before the first batch, below the smallest unit, or where a batch cannot be cut exactly.
        """
        return self._smaller(reason, has_failed=False)

    def grow(self, reason: str) -> bool:
        """Take back one halving by `shrink`; return whether there was one. What memory refused stays refused."""
        grown = self._largest is not None and self.sizes.relax(self._largest)
        if grown:
            self._grown(reason)
        return grown

    def _grown(self, reason: str) -> None:
        size = self.micro_batch_size
        self._changed_by = f"larger again: {reason}; {size} rows at once"
        self.events.append(f"{reason}; micro-batches of {size} rows from here on")
        log.info("%s", self.events[-1])

    def _smaller(self, reason: str, *, has_failed: bool) -> bool:
        """Halve the micro-batch; with evidence against the size in use if it `has_failed`, else for as long as pressure lasts."""
        shape, shrunk = self._largest, False
        self.kept.give_back(for_good=True)
        try:
            if shape is None:
                what_next = "no batch that can be cut has run yet"
            else:
                self.allow_split(shape)
                before = self.sizes.state_dict()
                if self.sizes.at_once(shape) > self.sizes.smallest(shape):
                    shrunk = (
                        self.sizes.failed(shape, room_bytes=self.watch.bytes) if has_failed else self.sizes.press(shape)
                    )
                if self._verdict is None and shrunk and self._before_watch is None:
                    self._before_watch = before
                what_next = (
                    f"micro-batches of {self.sizes.at_once(shape)} rows from here on"
                    if shrunk
                    else "nothing left to shrink"
                )
        except SplitError:  # memory has not run out: a batch that cannot be cut exactly goes on whole
            what_next = "its batches cannot be cut exactly, so it goes on with them whole"
        if shrunk:
            self._changed_by = f"smaller: {reason}"
        self.events.append(f"{reason}; {what_next}")
        log.warning("%s", self.events[-1])
        self._remember()
        return shrunk

    def sizes_state(self) -> dict[str, Any]:
        """Return the sizes found so far and what they hold for, as plain values."""
        return {
            "fingerprint": self._fingerprint,
            "training": self.sizes.state_dict(),
            "evaluation": self.evaluation_sizes.state_dict(),
            "recomputes": self.recomputation.everything,
        }

    def load_sizes_state(self, state: dict[str, Any] | None) -> None:
        """Go on with sizes that another run found, if it ran the same module in the same memory."""
        if state is not None and state["fingerprint"] == self._fingerprint:
            if state.get("recomputes"):
                self.recompute_more("as memory ran out without it in an earlier run")
            self.sizes.load_state_dict(state["training"])
            self.evaluation_sizes.load_state_dict(state["evaluation"])

    def _remember(self) -> None:
        self._file.write(self.sizes_state())


def _caches_of(watch: BudgetWatch) -> CacheCare:
    """Return what looks after the caches of the watch's device; a simulated machine's are read through the watch."""
    if watch.machine is None:
        return CacheCare()
    return CacheCare(
        read=lambda _: watch.reading(),
        live=lambda _: watch.reading().allocated.bytes,
        release=lambda _: watch.release(),
    )
