"""Fixtures for tests of callbacks: a small exact run, and made-up memory readings."""

import importlib
import logging

import pytest

from lightning_unified.hardware.reading import Figure, Reading


@pytest.fixture(scope="session")
def small_run():
    """The module `small_run.py`, which is also a script."""
    return importlib.import_module("tests.support.runs.small")


@pytest.fixture
def reading():
    """Make a `Reading` from bytes; a figure left out is unknown."""

    def make(**figures):
        known = {
            name: Figure(figures.get(name), f"fake {name}" if name in figures else "unknown: not given")
            for name in ("total", "available", "allocated", "reserved", "peak")
        }
        return Reading(device="cpu", backend="cpu", name="fake", pool="unified", **known)

    return make


@pytest.fixture(autouse=True)
def _quiet():
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
