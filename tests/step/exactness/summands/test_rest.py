"""What a loss has besides its summands is known where it is NaN, if it is a constant."""

import pytest
import torch

from lightning_unified.step.exactness.losses.summands.rest import KnownRest
from lightning_unified.step.exactness.losses.summands.tree import REST, Summand

NAN = float("nan")


@pytest.mark.parametrize(
    ("rests", "expected"),
    [
        ((2.5, NAN, 2.5, NAN), (2.5, 2.5, 2.5, 2.5)),
        ((NAN, 2.5, NAN), (NAN, 2.5, 2.5)),
        ((2.5, 2.6, NAN, 2.7), (2.5, 2.6, NAN, 2.7)),
        ((2.5, 2.5 + 1e-15, NAN), (2.5, 2.5, 2.5)),  # rounding
    ],
)
def test_a_constant_is_known_and_what_varies_stays_as_it_is(rests, expected):
    known, found = KnownRest(), []
    for rest in rests:
        one = Summand(REST, [], [], torch.tensor(rest, dtype=torch.float64))
        other = Summand("of tokens", [], [], torch.tensor(1.0, dtype=torch.float64))
        known.complete([other, one], torch.tensor(1.0 + rest, dtype=torch.float64))
        found.append(float(one.value))
        assert float(other.value) == 1.0
    assert found == pytest.approx(expected, nan_ok=True)
