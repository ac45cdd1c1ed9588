"""Guards every test: one thread, the random state, the environment and the working directory are as they were."""

import os
import random

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_world_after(monkeypatch):
    """Each test starts from seed 0 and leaves environment, generators and default dtype as it found them."""
    environment, directory, dtype = dict(os.environ), os.getcwd(), torch.get_default_dtype()
    random.seed(0)
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() == dtype, "the test changed the default dtype"
    monkeypatch.undo()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
