"""With `window_mean="terms"` an accumulation window trains as one batch of its rows."""

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import ConfigurationError
from lightning_unified.step.loop.window import WindowTerms
from tests.step.recovery.test_recovery import Fails
from tests.support.lanes import crossed, first_cells
from tests.support.modules.plain import MLP, RaggedTokens, fit, weights


class Undeclared(RaggedTokens):
    """Says nothing of its weights: labels are found by the check."""

    def configure_micro_batches(self, stage):
        return MicroBatchRules()


class Plain(MLP):
    """Mean over rows, no metrics that hold state."""


def trained(kind, *, batch_size, window, clip=None, callbacks=(), **strategy):
    torch.manual_seed(0)
    module = kind().double()
    seen, trainer = fit(
        module,
        module.loader(batch_size=batch_size),
        strategy=UnifiedStrategy(**strategy) if strategy else "auto",
        accumulate_grad_batches=window,
        gradient_clip_val=clip,
        callbacks=list(callbacks),
    )
    return module, seen, trainer


@first_cells(
    1,
    ("kind", "clip", "size"),
    crossed(
        [Plain, RaggedTokens, Undeclared],
        [None, 0.05],
        ["auto", 1, 3],
        fast=[
            (Plain, 0.05, "auto"),
            (RaggedTokens, None, 3),
            (Undeclared, 0.05, 1),
        ],
    ),
)
def test_a_window_trains_as_one_batch_of_all_its_rows_the_last_one_too(kind, clip, size):
    """22 rows: windows of 4 × 2 rows, 8, 8 and 6, are batches of 8, 8 and 6."""
    whole, whole_seen, _ = trained(kind, batch_size=8, window=1, clip=clip)
    module, seen, _ = trained(kind, batch_size=2, window=4, clip=clip, window_mean="terms", micro_batch_size=size)

    for mine, other in zip(seen.gradients, whole_seen.gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weights(module), weights(whole), rtol=1e-9, atol=1e-11)


def test_lightnings_own_mean_of_means_is_another_gradient():
    _, whole, _ = trained(RaggedTokens, batch_size=8, window=1)
    _, plain, _ = trained(RaggedTokens, batch_size=2, window=4)

    assert (plain.gradients[0] - whole.gradients[0]).norm() > 0.05 * whole.gradients[0].norm()


@first_cells(1, "phase", ["forward", "backward", "optimizer.step"])
def test_a_repeated_step_counts_no_batch_twice(phase):
    whole, _, _ = trained(RaggedTokens, batch_size=8, window=1, clip=0.05)
    failing = Fails(phase, batch=3 if phase == "optimizer.step" else 2)
    module, _, trainer = trained(
        RaggedTokens, batch_size=2, window=4, clip=0.05, window_mean="terms", callbacks=[failing]
    )

    assert trainer.strategy.recoveries == 1
    torch.testing.assert_close(weights(module), weights(whole), rtol=1e-9, atol=1e-11)


def test_a_window_of_one_batch_is_bit_for_bit_what_it_was():
    plain, _, _ = trained(RaggedTokens, batch_size=8, window=1, micro_batch_size=3)
    module, _, _ = trained(RaggedTokens, batch_size=8, window=1, micro_batch_size=3, window_mean="terms")

    assert torch.equal(weights(module), weights(plain))


def test_a_batch_without_a_term_adds_nothing():
    class Empty(RaggedTokens):
        def training_step(self, batch, batch_idx):
            if batch_idx % 4 == 1:
                batch = {**batch, "labels": torch.full_like(batch["labels"], -100)}
            return super().training_step(batch, batch_idx)

        def terms(self, batch):
            return 0 if self.trainer.fit_loop.batch_idx % 4 == 1 else super().terms(batch)

    module, seen, _ = trained(Empty, batch_size=2, window=4, window_mean="terms")

    assert all(gradient.isfinite().all() for gradient in seen.gradients)
    assert weights(module).isfinite().all()


def test_a_module_with_unknown_terms_is_asked_to_declare_them():
    class Sums(RaggedTokens):
        def configure_micro_batches(self, stage):
            return MicroBatchRules(loss_is_sum=True, prepare=self.with_totals)

    with pytest.raises(ConfigurationError, match=r"loss_is_sum=True.*give loss_weight as well"):
        trained(Sums, batch_size=2, window=4, window_mean="terms")


def test_an_unknown_mean_is_refused():
    with pytest.raises(ConfigurationError, match="window_mean='tokens'"):
        UnifiedStrategy(window_mean="tokens")


def test_a_run_that_stops_inside_a_window_goes_on_with_its_terms():
    window = WindowTerms()
    window.begin(5, opens=True)
    window.done()
    other = WindowTerms()
    other.load_state_dict(window.state_dict())
    for either in (window, other):
        either.begin(3, opens=False)

    assert other.factor == window.factor == 3 / 5


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_every_term_of_a_window_counts_the_same(terms):
    window, parameter = WindowTerms(), torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.zeros_like(parameter)
    for index, count in enumerate(terms):
        window.begin(count, opens=index == 0)
        parameter.grad += window.factor * count if count else 0.0  # a batch whose mean gradient is its own count
        if index < len(terms) - 1:
            window.done()
    window.divide([parameter])

    expected = sum(count * count for count in terms) / (sum(terms) or 1)
    assert float(parameter.grad) == pytest.approx(expected)


def test_the_lightning_loop_state_holds_the_window(tmp_path):
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 1:
                state = trainer.fit_loop.state_dict()
                self.window = state["epoch_loop.automatic_optimization.state_dict"]["window"]

    saves = Saves()
    trained(RaggedTokens, batch_size=2, window=4, window_mean="terms", callbacks=[saves])

    assert saves.window == {"terms": [1.0, 5.0], "unit": None, "counted_by": "loss_weight"}
