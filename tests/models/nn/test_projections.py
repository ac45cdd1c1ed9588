"""Projections tell how large the difference of two tensors is, and are small themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unified.nn.second_run.projections import Projections


def of(*tensors: torch.Tensor) -> Projections:
    projections = Projections()
    for tensor in tensors:
        projections.add(tensor)
    return projections


@given(st.lists(st.integers(1, 70), min_size=1, max_size=3), st.floats(1e-6, 0.5), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_the_size_of_a_difference_is_told(shape, share, seed):
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(shape, generator=generator, dtype=torch.float64)
    change = torch.randn(shape, generator=generator, dtype=torch.float64)
    other = one + share * change * one.norm() / change.norm()
    [told] = of(one).differences(of(other))
    assert share / 8 < told < share * 8


@pytest.mark.parametrize("count", [1, 2, 15, 17, 1023, 1024, 2047, 2048, 4095, 100_003])
def test_tensors_of_any_size_equal_themselves_only(count):
    values = torch.linspace(1, 2, count)
    assert of(values).differences(of(values.clone())) == [0.0]
    assert of(values).differences(of(1.01 * values))[0] == pytest.approx(0.01, rel=0.05)


def test_values_that_change_places_differ():
    values = torch.tensor([1.0, 2.0, 3.0])
    assert of(values).differences(of(values.flip(0)))[0] > 0.1


def test_nan_equals_nan_only():
    values = torch.tensor([1.0, float("nan")])
    same, other = of(values, values).differences(of(values, torch.ones(2)))
    assert same == 0.0
    assert not other <= 1.0


def test_complex_and_half_precise_tensors_are_compared_too():
    values = torch.randn(5, 7, dtype=torch.complex64)
    assert of(values).differences(of(values.conj()))[0] > 0.1
    assert of(values.real.bfloat16()).differences(of(values.real.bfloat16())) == [0.0]


def test_views_of_another_layout_are_compared_by_their_entries():
    values = torch.randn(64, 48)
    assert of(values.t()).differences(of(values.t().clone())) == [0.0]


def test_a_hundred_tensors_keep_fourteen_kilobytes():
    projections = of(*(torch.randn(2000) for _ in range(100)))
    storages = {row.untyped_storage().data_ptr(): row.untyped_storage().nbytes() for row in projections._rows}
    assert len(storages) == 7  # sixteen tensors each
    assert sum(storages.values()) == 7 * 16 * 16 * 8  # in float64, as on a CPU
