"""The predicted peak of a step with attention is the peak that a simulated Mac counts."""

import pytest

from benchmarks.options.attention.attention_peaks import KINDS, SIZES, peaks
from tests.support.lanes import crossed, first_cells

FAST = (
    ("language", "chunked", False, SIZES[0]),
    ("encoder", "chunked", True, SIZES[0]),
    ("vision", "torch", True, SIZES[0]),
)
CELLS = crossed(KINDS, ("torch", "chunked"), (False, True), SIZES, fast=FAST)


@first_cells(1, ("kind", "attention", "recompute", "sizes"), CELLS)
def test_a_simulated_mac_counts_the_predicted_peak(kind, attention, recompute, sizes):
    if kind == "language":
        pytest.importorskip("transformers")
    predicted, counted = peaks(kind, sizes, attention=attention, recompute=recompute)

    assert counted == pytest.approx(predicted, rel=0.03)
