"""Before a module is cut, gradients say by what its micro-batches are weighted, or that it cannot be cut; nothing else changes."""

import copy
import logging
from dataclasses import replace

import lightning as L
import pytest
import torch
from modules import MLP, fit, weights
from split_modules import (
    EXPECTED,
    BatchNorm,
    ByItsOwnMode,
    ClassWeighted,
    Contrastive,
    Dropout,
    Group,
    LateRagged,
    Mean,
    Miscounted,
    Net,
    ShiftedTokens,
    Sum,
    Tokens,
    Zero,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import SplitError

EXACT = {"rtol": 1e-10, "atol": 1e-12}
SIZE = {"GroupUnits": 4}


def run(kind, *, strategy=None, precision="64-true", **options):
    torch.manual_seed(0)
    module = kind()
    module = module.double() if precision == "64-true" else module.float()
    strategy = strategy or UnifiedStrategy(micro_batch_size=SIZE.get(kind.__name__, 3), batch_norm="micro")
    dtype = torch.float64 if precision == "64-true" else torch.float32
    seen, _ = fit(module, kind.loader(dtype=dtype), strategy=strategy, precision=precision, **options)
    return module, seen, strategy


def said(strategy):
    return strategy.plan.reasons["loss_weight"]


CUT = [kind for kind, what in EXPECTED.items() if what not in ("refused", "unchecked")]
REFUSED = [kind for kind, what in EXPECTED.items() if what == "refused"]


@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", CUT, ids=lambda kind: kind.__name__)
def test_the_rule_that_agrees_is_taken_and_named(kind, precision):
    _, _, strategy = run(kind, precision=precision)

    assert said(strategy).startswith(f"{EXPECTED[kind]}: gradients of ")


@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_module_that_no_rule_fits_is_refused_by_name_with_the_ways_out(kind, precision):
    with pytest.raises(SplitError, match=rf"^{kind.__name__} cannot be cut exactly.*loss_weight.*splittable"):
        run(kind, precision=precision)


@pytest.mark.parametrize(
    "kind", [kind for kind in CUT if kind.__name__ not in ("Dropout", "FunctionalDropout", "BatchNorm")]
)
def test_what_is_accepted_has_the_gradients_of_the_undivided_batch(kind):
    _, whole, _ = run(kind, strategy="auto")
    _, cut, _ = run(kind)

    torch.testing.assert_close(torch.stack(cut.gradients), torch.stack(whole.gradients), **EXACT)


@pytest.mark.parametrize("kind", [ShiftedTokens, ClassWeighted, Contrastive, Group])
def test_without_the_check_these_would_be_silently_wrong(kind):
    _, whole, _ = run(kind, strategy="auto")
    _, cut, strategy = run(kind, strategy=UnifiedStrategy(micro_batch_size=3, check_split=False))

    assert not torch.allclose(cut.gradients[0], whole.gradients[0], rtol=1e-3)
    assert "check_split=False" in said(strategy)


def test_an_inferred_rule_is_an_event_and_plain_rows_are_none():
    assert run(Mean)[2].events == []
    assert run(ShiftedTokens)[2].events[0].startswith("micro-batches weighted by scored labels, shifted")


def test_rules_that_the_first_batch_does_not_tell_apart_are_told_apart_by_a_later_one():
    first = run(LateRagged, limit_train_batches=1, max_epochs=1)[2]
    later = run(LateRagged, max_epochs=1)[2]

    assert said(first).startswith("rows: ")
    assert said(later).startswith("scored labels, shifted: ")


class Rounded(Sum):
    """Its gradients are off by a twentieth in a direction that depends on how many rows run at once, as kernels round."""

    share = 0.05

    def make_middle(self):
        return nn.Sequential(nn.Linear(16, 400), nn.Tanh(), nn.Linear(400, 16))

    def loss(self, out, batch):
        for parameter in self.parameters():
            parameter._backward_hooks = None
        rows = len(out)

        def rounded(gradient):
            noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(rows)).to(gradient)
            return gradient + self.share * gradient.norm() * noise / noise.norm()

        for parameter in self.parameters():
            parameter.register_hook(rounded)
        return super().loss(out, batch)


class DeclaredRounded(Rounded):
    def configure_micro_batches(self, stage):
        return MicroBatchRules(loss_is_sum=True)


class DeclaredWrong(Sum):
    """Says that its loss adds up, and counts a row that runs alone a twenty-fifth too high."""

    def configure_micro_batches(self, stage):
        return MicroBatchRules(loss_is_sum=True)

    def loss(self, out, batch):
        return super().loss(out, batch) * (1.04 if len(out) == 1 else 1.0)


def test_of_a_declared_rule_bfloat16_may_round_more_but_its_weights_must_be_right():
    assert said(run(DeclaredRounded, precision="bf16-mixed")[2]).startswith("loss_is_sum: gradients")
    with pytest.raises(SplitError, match="DeclaredWrong cannot be cut exactly"):
        run(DeclaredWrong, precision="bf16-mixed")


@pytest.mark.parametrize(("kind", "precision"), [(Rounded, "bf16-mixed"), (DeclaredRounded, "32-true")])
def test_what_is_not_declared_and_not_bfloat16_may_not_round_so_much(kind, precision):
    with pytest.raises(SplitError, match=f"{kind.__name__} cannot be cut exactly"):
        run(kind, precision=precision)


def test_a_loss_that_adds_up_is_refused_with_the_rule_that_says_so():
    with pytest.raises(SplitError, match="adds up over rows: set loss_is_sum=True"):
        run(Sum)

    class Declared(Sum):
        def configure_micro_batches(self, stage):
            return MicroBatchRules(loss_is_sum=True)

    assert said(run(Declared)[2]).startswith("loss_is_sum: ")


def test_a_declared_weight_is_held_to_what_it_declares():
    with pytest.raises(SplitError, match=r"\(loss_weight: \d"):
        run(Miscounted)

    class Right(ShiftedTokens):
        def configure_micro_batches(self, stage):
            return MicroBatchRules(loss_weight=lambda batch: (batch["labels"][:, 1:] != -100).sum())

    assert said(run(Right)[2]).startswith("loss_weight: ")


@pytest.mark.parametrize(("kind", "why"), [(Zero, "is zero"), ("Noise", "random")])
def test_what_gradients_cannot_tell_is_said_once_and_goes_by_rows(kind, why, caplog):
    kind = next(each for each in EXPECTED if each.__name__ == kind) if isinstance(kind, str) else kind
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        _, _, strategy = run(kind)

    warnings = [record.message for record in caplog.records if "unchecked" in record.message]
    assert len(warnings) == 1
    assert why in warnings[0]
    assert said(strategy).startswith("rows, unchecked: ")


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError])
def test_a_module_that_does_more_by_its_mode_than_to_drop_out_is_left_in_it_and_runs_unchecked(error):
    class Other(ByItsOwnMode):
        def forward(self, x):
            if not self.training:
                raise error("only in training")
            return super().forward(x)

    class Fails(Net):
        def make_middle(self):
            return Other()

    module, _, strategy = run(Fails)

    assert said(strategy) == "rows, unchecked: its gradient is random without dropout, or not finite"
    assert module.net[1].training


def test_where_two_rows_never_fit_labels_that_are_left_out_decide():
    class OneRow(Tokens):
        def loss(self, out, labels):
            if len(out) > 1:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
            return super().loss(out, labels)

    _, whole, _ = run(Tokens, strategy="auto")
    _, seen, strategy = run(OneRow, strategy=UnifiedStrategy())

    assert said(strategy).startswith("scored labels, unchecked: memory ran out")
    torch.testing.assert_close(torch.stack(seen.gradients), torch.stack(whole.gradients), rtol=1e-9, atol=1e-11)


def test_a_step_that_fails_on_a_part_of_a_group_is_refused_with_the_unit():
    class Views(Group):
        def loss(self, out, batch):
            return super().loss(out, batch) + 0 * batch["reward"].view(-1, 4).sum()

    with pytest.raises(SplitError, match=r"training_step fails on 1 or 2 rows .*unit=n"):
        run(Views)


class Keeps(MLP):
    """Changes all that a step can change: generators, buffers, lists, counters, its batch, metrics and logs."""

    def __init__(self) -> None:
        super().__init__(dropout=0.4)
        self.norm = nn.BatchNorm1d(4, momentum=0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.losses, self.count = [], 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        self.count += 1
        batch["x"].add_(1.0)
        outputs = super().training_step(batch, batch_idx)
        self.losses.append(float(outputs["loss"]))
        self.made = self.norm(outputs["logits"])
        outputs["loss"] = outputs["loss"] + 0.1 * self.made.pow(2).mean()
        return outputs


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("kind", [Keeps, Dropout, BatchNorm])
def test_a_run_with_the_check_is_bit_for_bit_the_run_without(kind, window):
    results = []
    for check in (True, False):
        strategy = UnifiedStrategy(micro_batch_size=3, batch_norm="micro", check_split=check)
        results.append((*run(kind, strategy=strategy, accumulate_grad_batches=window)[:2], torch.get_rng_state()))
    (checked, seen, state), (plain, twin, plain_state) = results

    assert torch.equal(weights(checked), weights(plain))
    assert torch.equal(state, plain_state)
    for mine, other in zip(checked.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, other)
    assert seen.callback_metrics == twin.callback_metrics
    assert all(torch.equal(mine, other) for mine, other in zip(seen.gradients, twin.gradients, strict=True))
    if kind is Keeps:
        assert (checked.losses, checked.count) == (plain.losses, plain.count)


def test_the_check_runs_no_backward_hooks_and_runs_once_a_fit():
    class Counts(Mean):
        before, steps = 0, 0

        def on_before_backward(self, loss):
            type(self).before += 1

        def loss(self, out, batch):
            type(self).steps += 1
            return super().loss(out, batch)

    run(Counts)

    assert Counts.before == 18  # three batches of eight rows as 3, 3, 2; two epochs
    assert Counts.steps == 18 + 8  # two pairs of rows: whole, whole again, and each alone


@pytest.mark.parametrize("only_cudnn", [False, True])
def test_the_check_leaves_cudnns_attention_out_where_there_is_another(only_cudnn):
    kernels, found = torch.backends.cuda, []
    note = found.append  # a list that the step names would be put back

    class Noted(Mean):
        def training_step(self, batch, batch_idx=0):
            note(kernels.cudnn_sdp_enabled())
            return super().training_step(batch, batch_idx)

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *([] if only_cudnn else [SDPBackend.MATH])]):
        run(Noted)
        assert kernels.cudnn_sdp_enabled()

    assert found[0] is only_cudnn
    assert found[-1]  # what is trained keeps its kernel


def test_an_undivided_run_is_not_checked():
    _, _, strategy = run(Contrastive, strategy=UnifiedStrategy())

    assert said(strategy) == "no batch has been cut"


def test_memory_that_runs_out_in_the_check_leaves_rows_and_says_so(caplog):
    class Tight(Mean):
        def loss(self, out, batch):
            if len(out) == 2 and not self.trainer.strategy.events:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
            return super().loss(out, batch)

    tight, _, strategy = run(Tight, strategy=UnifiedStrategy(micro_batch_size=1))
    plain, _, _ = run(Mean, strategy=UnifiedStrategy(micro_batch_size=1))

    assert strategy.recoveries == 0
    assert "memory ran out while it was checked" in strategy.events[0]
    assert torch.equal(weights(tight), weights(plain))


@pytest.mark.parametrize("failures", [1, 2])
def test_memory_that_runs_out_in_the_check_once_or_twice_does_not_keep_it_from_the_rule(failures):
    class Tight(ShiftedTokens):
        left = failures

        def loss(self, out, labels):
            if len(out) == 2 and self.left:
                type(self).left -= 1  # of the class: the check puts back what it changes in the module
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
            return super().loss(out, labels)

    tight, _, strategy = run(Tight)
    plain, _, _ = run(ShiftedTokens)

    assert Tight.left == 0
    assert said(strategy).startswith("scored labels, shifted")
    assert torch.equal(weights(tight), weights(plain))


def test_a_recovery_checks_before_it_cuts():
    class Large(Contrastive):
        def loss(self, out, batch):
            if len(out) > 4:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
            return super().loss(out, batch)

    with pytest.raises(SplitError, match="Large cannot be cut exactly"):
        run(Large, strategy=UnifiedStrategy())


def test_a_batch_above_a_watched_budget_that_cannot_be_cut_goes_on_whole():
    class Shrinks(L.Callback):
        """Does what the watch over the budget does when it sees a peak above it."""

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            strategy = trainer.strategy
            if batch_idx == 1 and strategy.sizes.runs_whole and not strategy.events:
                strategy.policy.watch.budget = replace(strategy.budget, bytes=1)
                strategy.policy.batch_done(None)

    _, whole, _ = run(Contrastive, strategy="auto")
    _, seen, strategy = run(Contrastive, strategy=UnifiedStrategy(), callbacks=[Shrinks()])

    assert any("goes on with them whole" in event for event in strategy.events)
    assert torch.equal(torch.stack(seen.gradients), torch.stack(whole.gradients))


def test_a_second_fit_checks_its_own_module():
    strategy = UnifiedStrategy(micro_batch_size=3)
    module, _, _ = run(Mean, strategy=strategy)
    other = copy.deepcopy(module)
    other.__class__ = Contrastive

    module.trainer.fit_loop.max_epochs = 4

    with pytest.raises(SplitError, match="Contrastive cannot be cut"):
        module.trainer.fit(other, Net.loader())
