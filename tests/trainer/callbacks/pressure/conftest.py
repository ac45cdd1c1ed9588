"""Samples of memory pressure by hand."""

import pytest

from lightning_unified.callbacks.pressure.watch import PressureWatch


@pytest.fixture
def by_hand(monkeypatch):
    """Samples come from the test, not from a thread."""
    monkeypatch.setattr(PressureWatch, "start", lambda self: None)
