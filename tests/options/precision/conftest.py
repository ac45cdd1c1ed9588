"""A simulated Mac, as far as a Trainer examines it before training."""

import platform

import lightning as L
import pytest
import torch
from lightning.fabric.accelerators.mps import MPSAccelerator as FabricsMPS
from torch.torch_version import TorchVersion

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
WRITTEN = ("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO", "LIGHTNING_UNIFIED_MPS_WRITTEN")


@pytest.fixture
def mac(monkeypatch):
    """Make torch and Lightning take this machine for a Mac; models cannot be moved there."""
    for name in WRITTEN:
        monkeypatch.setenv(name, "")  # so that what is written is taken back
        monkeypatch.delenv(name)

    def become(chip="Apple M4", version=None):
        monkeypatch.setattr(platform, "processor", lambda: "arm")
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.mps, "get_name", lambda: chip, raising=False)
        if version is not None:
            monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        FabricsMPS.is_available.cache_clear()

    yield become
    monkeypatch.undo()
    FabricsMPS.is_available.cache_clear()


@pytest.fixture
def trainer():
    """Make a Trainer that writes nothing."""

    def make(strategy, **options):
        return L.Trainer(strategy=strategy, **{**QUIET, "max_steps": 1, **options})

    return make
