"""The predicted peak of a step with attention is the peak that a simulated Mac counts."""

import pytest

from benchmarks.options.attention.attention_peaks import KINDS, SIZES, peaks

CELLS = [
    pytest.param(kind, attention, recompute, sizes, marks=(pytest.mark.slow,) if place else ())
    for kind in KINDS
    for attention in ("torch", "chunked")
    for recompute in (False, True)
    for place, sizes in enumerate(SIZES)
]


@pytest.mark.parametrize(("kind", "attention", "recompute", "sizes"), CELLS)
def test_a_simulated_mac_counts_the_predicted_peak(kind, attention, recompute, sizes):
    if kind == "language":
        pytest.importorskip("transformers")
    predicted, counted = peaks(kind, sizes, attention=attention, recompute=recompute)

    assert counted == pytest.approx(predicted, rel=0.03)
