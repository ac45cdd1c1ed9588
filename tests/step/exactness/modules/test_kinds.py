"""Steps as users write them: split, they equal plain Lightning, or are refused.

An event names every step whose draws differ.
"""

import numpy as np
import pytest
import torch

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells, some
from tests.support.modules.drawn_kinds import DRAWN, DRAWN_BY_ROW_ON_THE_HOST, REFUSED, RecurrentDropout
from tests.support.modules.plain import fit
from tests.support.modules.step_kinds import SAME, Compiled, Kind

EXACT = {"rtol": 1e-9, "atol": 1e-11}
SAID = "random draws, such as dropout's, are made for each micro-batch, not for the whole batch"

of_each = lambda kinds, fast: first_cells(fast, "kind", kinds, ids=lambda kind: kind.__name__)  # noqa: E731


def run(kind, strategy="auto", *, precision="64-true", **options):
    torch.manual_seed(0)
    module = kind()
    module = module.double() if precision == "64-true" else module.float()
    return module, *fit(module, kind.loader(), strategy=strategy, precision=precision, **options)


def split(kind, **options):
    return run(kind, UnifiedStrategy(micro_batch_size=3), **options)


def assert_same(kind, **options):
    plain, expected, plain_trainer = run(kind, **options)
    ours, seen, trainer = split(kind, **options)

    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), **EXACT)
    assert seen.callback_metrics == [pytest.approx(one, rel=1e-6, abs=1e-7) for one in expected.callback_metrics]
    assert trainer.callback_metrics.keys() == plain_trainer.callback_metrics.keys()
    for actual, given in zip(seen.outputs, expected.outputs, strict=True):
        torch.testing.assert_close(actual, given, **EXACT)
    return trainer


@of_each(some(SAME, *SAME[::2]), 2)
def test_a_step_without_draws_equals_plain_lightning(kind):
    trainer = assert_same(kind)

    assert trainer.strategy.plan.reasons["loss_weight"].startswith("rows: gradients of")
    assert trainer.strategy.events == []


@pytest.mark.slow
def test_a_compiled_network_equals_plain_lightning():
    assert_same(Compiled)


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
@of_each(DRAWN, 3)
def test_a_step_with_draws_is_split_and_said(kind, precision):
    if kind is RecurrentDropout and precision == "bf16-mixed":
        pytest.skip("CPUs have no LSTM in bfloat16")
    _, _, trainer = split(kind, precision=precision)

    assert trainer.strategy.plan.reasons["loss_weight"].startswith("rows: gradients of")
    assert trainer.strategy.events == [SAID]


@of_each(DRAWN_BY_ROW_ON_THE_HOST, 1)
def test_rows_drawn_by_python_or_numpy_are_split_and_said_to_be_compared_without(kind):
    _, _, trainer = split(kind)

    assert trainer.strategy.plan.reasons["loss_weight"].startswith("rows: gradients of")
    (event,) = trainer.strategy.events
    assert event.startswith(f"{SAID}; gradients were compared without them (its step draws from Python's or NumPy's")


@of_each(REFUSED, 4)
def test_a_step_that_mixes_rows_is_refused_before_an_update(kind):
    torch.manual_seed(0)
    np.random.seed(0)  # one draw in two hundred hardly mixes the first batch
    module = kind().double()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(SplitError, match="cannot be split exactly"):
        fit(module, Kind.loader(), strategy=UnifiedStrategy(micro_batch_size=3))
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
