"""Single numbers compare as entries of larger tensors do."""

import math
from itertools import product

import pytest
import torch

from lightning_unified.step.results.sameness import same, size_of

NUMBERS = (0.0, 1.0, 1.0 + 1e-6, 1.0 + 3e-6, -1.0, 1e-30, 3e4, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.0, 1.0, 1e3])
def test_a_tensor_of_one_number_is_the_same_where_one_of_two_equal_numbers_is(dtype, size):
    for one, other in product(NUMBERS, NUMBERS):
        single = [torch.tensor(number, dtype=dtype) for number in (one, other)]
        pairs = [torch.stack([number, number]) for number in single]

        assert same(*single, tolerance=1e-6, size=size) is same(*pairs, tolerance=1e-6, size=size), (one, other)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_size_of_one_number_is_that_of_two_equal_ones(number):
    expected = size_of(torch.tensor([number, number], dtype=torch.float64))

    assert size_of(number) == size_of(torch.tensor(number, dtype=torch.float64)) == expected
