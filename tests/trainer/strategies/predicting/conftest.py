"""A run that nothing limits, and a cache for each test."""

import pytest

from tests.trainer.strategies.predicting.deep import fit, weights


@pytest.fixture(scope="module")
def undivided():
    return weights(fit("auto"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_UNIFIED_CACHE", str(tmp_path))
