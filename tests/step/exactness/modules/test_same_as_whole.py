"""A batch that ran as micro-batches equals the batch that ran whole.

Compared: gradients, weights, logs, outputs and metrics.
"""

from functools import cache

import pytest
import torch

from lightning_unified import UnifiedStrategy
from tests.support.lanes import crossed, first_cells, some
from tests.support.modules.plain import MLP, RaggedTokens, fit, weights

EXACT = {"rtol": 1e-12, "atol": 1e-14}
SIZES = [1, 2, 3, 5, 8]


def make(kind: str):
    torch.manual_seed(0)
    return {"mlp": MLP, "tokens": RaggedTokens, "token sums": lambda: RaggedTokens(sums=True)}[kind]().double()


@cache
def mlp(size):
    """Train in micro-batches of `size` rows, or under plain Lightning; the tests only read what they get."""
    module = make("mlp")
    return fit(module, module.loader(), strategy=size if size == "auto" else UnifiedStrategy(micro_batch_size=size))


@first_cells(
    1,
    ("kind", "clip", "window"),
    crossed(
        ["mlp", "tokens", "token sums"],
        [None, 0.1],
        [1, 3],
        fast=[("mlp", 0.1, 1), ("token sums", None, 3)],
    ),
)
def test_gradients_and_weights_do_not_depend_on_the_micro_batch_size(kind, clip, window):
    """22 rows in batches of 8, so that the last batch is short.

    Three batches an epoch, two epochs: with a window of 3 no window is short; the test below has a short one.
    """
    options = {"accumulate_grad_batches": window, "gradient_clip_val": clip}
    reference = make(kind)
    plain, _ = fit(reference, reference.loader(), **options)
    for size in SIZES:
        module = make(kind)
        seen, trainer = fit(module, module.loader(), strategy=UnifiedStrategy(micro_batch_size=size), **options)

        assert trainer.global_step == len(plain.gradients)
        torch.testing.assert_close(torch.stack(seen.gradients), torch.stack(plain.gradients), **EXACT)
        torch.testing.assert_close(weights(module), weights(reference), **EXACT)


@pytest.mark.slow
@first_cells(1, "kind", ["mlp", "tokens"])
def test_a_short_last_window_is_the_same_too(kind):
    reference = make(kind)
    plain, _ = fit(reference, reference.loader(), accumulate_grad_batches=2)
    module = make(kind)
    seen, _ = fit(module, module.loader(), strategy=UnifiedStrategy(micro_batch_size=3), accumulate_grad_batches=2)

    assert len(seen.gradients) == len(plain.gradients) == 4
    torch.testing.assert_close(torch.stack(seen.gradients), torch.stack(plain.gradients), **EXACT)


@first_cells(1, "size", some(SIZES, 1, 3))
def test_every_logged_value_is_the_whole_batchs(size):
    (plain, plain_trainer), (seen, trainer) = mlp("auto"), mlp(size)

    for step, expected in enumerate(plain.callback_metrics):
        assert seen.callback_metrics[step] == pytest.approx(expected, rel=1e-6, abs=1e-7), f"step {step}"
    names = {"loss_epoch", "sum_epoch", "max_epoch", "min_epoch", "given_epoch", "accuracy_epoch", "f1_epoch", "error"}
    assert names <= set(trainer.callback_metrics)
    for name in names:
        assert float(trainer.callback_metrics[name]) == pytest.approx(
            float(plain_trainer.callback_metrics[name]), rel=1e-6
        ), name


@first_cells(1, "size", some(SIZES, 1, 3))
def test_callbacks_see_the_outputs_of_the_whole_batch(size):
    (plain, _), (seen, _) = mlp("auto"), mlp(size)

    for expected, actual in zip(plain.outputs, seen.outputs, strict=True):
        torch.testing.assert_close(actual["loss"], expected["loss"], **EXACT)
        torch.testing.assert_close(actual["logits"], expected["logits"].detach(), **EXACT)
        torch.testing.assert_close(actual["confidence"], expected["confidence"].detach(), **EXACT)
        assert actual["names"] == expected["names"]


def test_hooks_run_once_a_batch_whatever_the_number_of_micro_batches():
    whole, parts = make("mlp"), make("mlp")
    plain, _ = fit(whole, whole.loader(), accumulate_grad_batches=2)
    seen, _ = fit(parts, parts.loader(), strategy=UnifiedStrategy(micro_batch_size=1), accumulate_grad_batches=2)

    assert (seen.after_backward, seen.zeroed, len(seen.outputs)) == (
        plain.after_backward,
        plain.zeroed,
        len(plain.outputs),
    )


def test_an_undivided_batch_is_bit_for_bit_plain_lightning():
    whole, unified = MLP(dropout=0.3).double(), MLP(dropout=0.3).double()
    unified.load_state_dict(whole.state_dict())
    fit(whole, whole.loader(), accumulate_grad_batches=2, gradient_clip_val=0.5)
    fit(unified, unified.loader(), strategy="unified", accumulate_grad_batches=2, gradient_clip_val=0.5)

    assert torch.equal(weights(whole), weights(unified))


def test_counting_rows_where_tokens_are_meant_would_be_wrong():
    """The negative twin: without its loss weight the ragged module's gradients differ.

    So the tests above can fail.
    """
    reference, module = make("tokens"), make("tokens")
    plain, _ = fit(reference, reference.loader())
    module.terms = lambda batch: len(batch["tokens"])
    seen, _ = fit(module, module.loader(), strategy=UnifiedStrategy(micro_batch_size=3, check_split=False))

    assert not torch.allclose(seen.gradients[0], plain.gradients[0], rtol=1e-3)
