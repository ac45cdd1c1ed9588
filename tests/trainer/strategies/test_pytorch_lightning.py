"""Lightning's other name: `pytorch_lightning` holds the same code as other classes."""

import subprocess
import sys
from importlib.machinery import PathFinder

import pytest

TRAINED = """
import lightning_unified
lightning_unified.replace_pytorch_lightning()
lightning_unified.replace_pytorch_lightning()  # twice is once
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.strategies import Strategy
import lightning.pytorch, lightning.pytorch.strategies, lightning_fabric.utilities, lightning.fabric.utilities, importlib.util
assert pl is lightning.pytorch and Strategy is lightning.pytorch.strategies.Strategy
assert lightning_fabric.utilities is lightning.fabric.utilities
assert importlib.util.find_spec("lightning.pytorch.strategies").name == "lightning.pytorch.strategies"
assert importlib.util.find_spec("pytorch_lightning.no_such_module") is None
trainer = pl.Trainer(strategy=lightning_unified.UnifiedStrategy(micro_batch_size=1), accelerator="cpu", fast_dev_run=True)
trainer.fit(BoringModel())
print(trainer.global_step)
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


pytestmark = pytest.mark.skipif(PathFinder.find_spec("pytorch_lightning") is None, reason="needs pytorch_lightning")


@pytest.mark.parametrize(
    "order", ["import pytorch_lightning as pl, lightning_unified", "import lightning_unified, pytorch_lightning as pl"]
)
def test_its_trainer_names_the_way_to_train(order):
    result = python(f"{order}\npl.Trainer(strategy='unified', accelerator='cpu')")

    error = result.stderr.splitlines()[-1]
    assert "ConfigurationError" in error, result.stderr
    assert "import lightning.pytorch as pl" in error
    assert "lightning_unified.replace_pytorch_lightning()" in error


def test_a_library_that_imports_it_trains_once_it_is_replaced():
    result = python(TRAINED)

    assert result.stdout.splitlines()[-1:] == ["1"], result.stderr


def test_it_is_not_replaced_once_it_is_imported():
    result = python("import lightning_unified, lightning_fabric\nlightning_unified.replace_pytorch_lightning()")

    assert "called after lightning_fabric had been imported" in result.stderr
