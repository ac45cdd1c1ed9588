"""The tolerance of gradients: relative to each parameter, with a share of all.

Rounding passes, and one wrong parameter does not.
"""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.gradients import (
    Tolerance,
    disagreement,
    sample_gradients,
    tolerance_in_training,
    unequal_existence,
)
from tests.support.modules.split import Net, run

FORMATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def sampled(*gradients, scale=1.0):
    """Return samples of parameters with these gradients; None for one without."""
    parameters = []
    for gradient in gradients:
        shape = (3,) if gradient is None else gradient.shape
        dtype = torch.float32 if gradient is None else gradient.dtype
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = gradient
        parameters.append(parameter)
    return sample_gradients(parameters, scale=scale)


def off(whole, *parts, dtype=torch.float32):
    return disagreement(sampled(*whole), [(sampled(*part), 1.0) for part in parts], Tolerance.of({dtype}))


def random(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_micro_batches_that_add_up_differ_by_nothing():
    first, second = random(50, 4), random(50, 4, seed=1)

    assert off([first + second], [first], [second]).excess < 1e-6


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_rounding_of_each_format_passes_and_fifty_times_as_much_does_not(dtype):
    relative = {torch.float64: 1e-7, torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    whole, noise = random(400), random(400, seed=1)

    assert off([whole], [whole + relative * noise], dtype=dtype).excess < 1
    assert off([whole], [whole + 50 * relative * noise], dtype=dtype).excess > 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_error_of_one_percent_in_one_small_parameter_is_found(dtype):
    large, small = random(10_000), random(8, seed=1)

    found = off([large, small], [large, 1.01 * small], dtype=dtype)

    assert found.excess > 1
    assert found.parameter == 1
    assert found.relative == pytest.approx(0.01, rel=0.01)


def test_a_gradient_of_nothing_but_rounding_passes():
    """As of the bias of an attention's keys, whose gradient is zero in exact arithmetic."""
    large, noise = random(1000), random(16, seed=1, scale=1e-6)

    assert off([large, noise], [large, -noise]).excess < 1
    assert off([large, 1e4 * noise], [large, -1e4 * noise]).excess > 1


def test_micro_batches_that_cancel_are_compared_with_their_own_size():
    """The whole is small because large parts cancel: what they round to is not an error."""
    part = random(100, scale=1e3)
    rest = random(100, seed=1, scale=1e-3)

    assert off([rest], [part], [rest - part * (1 + 1e-6)]).excess < 1


def test_of_several_parameters_the_worst_is_named():
    one, two, three = random(9), random(9, seed=1), random(9, seed=2)

    assert off([one, two, three], [one * 1.001, two, three * 1.1]).parameter == 2


def test_no_terms_at_all_are_a_gradient_of_zero():
    whole = random(5)

    assert disagreement(sampled(whole), [], Tolerance.of({torch.float32})).excess > 1


def test_a_difference_that_is_not_a_number_is_a_disagreement():
    whole = random(5)

    assert off([whole], [whole * float("nan")]).excess == float("inf")


def test_a_micro_batch_that_trains_other_parameters_disagrees():
    assert off([random(1)], [random(1)], [random(1), random(1)]).excess == float("inf")


def test_micro_batches_are_weighted():
    whole, weights = random(5), (0.75, 0.25, -1.0)
    parts = [(sampled(whole * (seed + 1)), weight) for seed, weight in enumerate(weights)]

    assert disagreement(sampled(whole * -1.75), parts, Tolerance.of({torch.float64})).excess < 1e-6


def test_two_zeros_agree():
    assert off([torch.zeros(4)], [torch.zeros(4)], [torch.zeros(4)]).excess == 0


@pytest.mark.parametrize(
    ("formats", "relative"),
    [
        ({torch.float64}, 1e-6),
        ({torch.float64, torch.float32}, 1e-4),
        ({torch.float32}, 1e-4),
        ({torch.float32, torch.float16}, 4e-3),
        ({torch.float32, torch.bfloat16}, 2e-2),
        ({torch.float16, torch.bfloat16}, 2e-2),
    ],
)
def test_the_coarsest_format_decides(formats, relative):
    assert Tolerance.of(formats).relative == relative


def test_a_missing_gradient_counts_as_zeros():
    sample = sampled(None, random(2))

    assert sample.values[:3].tolist() == [0, 0, 0]
    assert sample.lengths == [3, 2]


def test_a_sparse_gradient_is_compared_in_full():
    embedding = nn.Embedding(6, 2, sparse=True)
    embedding(torch.tensor([1, 4, 4])).sum().backward()

    sample = sample_gradients([embedding.weight])

    assert sample.values.view(6, 2)[:, 0].tolist() == [0, 1, 0, 0, 2, 0]


def test_a_complex_gradient_is_compared_by_both_its_parts():
    whole = torch.complex(torch.ones(3), 2 * torch.ones(3))

    assert sampled(whole).values.tolist() == [1, 2, 1, 2, 1, 2]
    assert off([whole], [torch.complex(torch.ones(3), 3 * torch.ones(3))]).excess > 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gradient_of_16_bits_is_added_up_in_float64(dtype):
    parts = [torch.full((3,), 2.0**-9, dtype=dtype) for _ in range(512)]
    total = off([torch.full((3,), 1.0, dtype=dtype)], *([part] for part in parts), dtype=torch.float64)

    assert sampled(parts[0]).values.dtype == torch.float64
    assert total.excess == 0


def test_the_scale_of_a_loss_is_taken_out_again():
    assert sampled(torch.full((2,), 3072.0), scale=1024.0).values.tolist() == [3.0, 3.0]


def test_large_gradients_are_sampled_in_every_column():
    gradient = torch.arange(1 << 18, dtype=torch.float64).view(-1, 64)

    sample = sampled(gradient)

    assert len(sample.values) < gradient.numel() / 8
    assert len((sample.values % 64).unique()) == 64


def test_a_gradient_that_is_not_finite_or_zero_says_nothing():
    assert sampled(random(3)).says_nothing == ""
    assert sampled(random(3), torch.tensor([1.0, float("inf")])).says_nothing == "its gradient is not finite"
    assert sampled(torch.zeros(3), None).says_nothing == "its gradient is zero on the rows looked at"


def test_a_gradient_of_zeros_and_none_are_told_apart():
    zeros, none = sampled(random(3), torch.zeros(3)), sampled(random(3), None)

    assert unequal_existence(zeros, [none, none]) == 1
    assert unequal_existence(none, [none, zeros]) == 1
    assert unequal_existence(zeros, [none, zeros]) is None
    assert unequal_existence(none, [none]) is None


class Extra(Net):
    """Uses a layer, multiplied by zero, for some numbers of rows."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(4, 1)

    def loss(self, out, batch):
        loss = super().loss(out, batch)
        return loss + 0.0 * self.extra(out).sum() if self.uses(len(out)) else loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.1, weight_decay=0.1)


class OfManyRows(Extra):
    def uses(self, rows):
        return rows > 4


class OfFewRows(Extra):
    def uses(self, rows):
        return rows <= 4


@pytest.mark.parametrize("kind", [OfManyRows, OfFewRows])
def test_a_parameter_with_a_gradient_only_whole_or_only_split_is_refused_by_name(kind):
    with pytest.raises(SplitError, match=r"extra\.weight gets a gradient of zeros from"):
        run(kind)


def test_a_module_without_parameters_has_no_disagreement():
    assert disagreement(sample_gradients([]), [], Tolerance.of(set())).excess == 0


@pytest.mark.parametrize(
    ("precision", "dtype", "device", "expected"),
    [
        ("32-true", torch.float32, "cpu", 1e-4),
        ("bf16-mixed", torch.float32, "cpu", 2e-2),
        ("16-mixed", torch.float32, "cpu", 4e-3),
        ("bf16-true", torch.bfloat16, "cpu", 2e-2),
        ("64-true", torch.float64, "cpu", 1e-6),
        ("32-true", torch.float32, "cuda", 2e-3),
        ("64-true", torch.float64, "cuda", 1e-6),
    ],
)
def test_results_of_training_may_round_as_its_formats_do(precision, dtype, device, expected):
    plugin = Precision()
    plugin.precision = precision
    trainer = SimpleNamespace(
        lightning_module=nn.Linear(2, 2, dtype=dtype),
        precision_plugin=plugin,
        strategy=SimpleNamespace(root_device=torch.device(device)),
    )

    assert tolerance_in_training(trainer) == expected
