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


# Each code runs in a copy of one interpreter, which has what takes most of Lightning's import, and nothing of Lightning.
COPIES = """
import multiprocessing, os, sys
import torch._dynamo, torch.distributed, torchmetrics
assert not {"lightning", "lightning_fabric", "lightning_unified", "pytorch_lightning"} & set(sys.modules)

def run(code, folder):
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), number)
    exec(code, {"__name__": "__main__"})

for code, folder in eval(sys.stdin.read()):
    process = multiprocessing.get_context("fork").Process(target=run, args=(code, folder))
    process.start()
    process.join()
"""
ORDERS = ["import pytorch_lightning as pl, lightning_unified", "import lightning_unified, pytorch_lightning as pl"]
LATE = "import lightning_unified, lightning_fabric\nlightning_unified.replace_pytorch_lightning()"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return what each code writes to stdout and stderr."""
    codes = [*(f"{order}\npl.Trainer(strategy='unified', accelerator='cpu')" for order in ORDERS), TRAINED, LATE]
    folders = [tmp_path_factory.mktemp("copy") for _ in codes]
    given = repr([(code, str(folder)) for code, folder in zip(codes, folders, strict=True)])
    subprocess.run([sys.executable, "-c", COPIES], input=given, text=True, timeout=240, check=True)
    found = [tuple((folder / name).read_text() for name in ("stdout", "stderr")) for folder in folders]
    return dict(zip([*ORDERS, TRAINED, LATE], found, strict=True))


pytestmark = pytest.mark.skipif(PathFinder.find_spec("pytorch_lightning") is None, reason="needs pytorch_lightning")


@pytest.mark.parametrize("order", ORDERS)
def test_its_trainer_names_the_way_to_train(written, order):
    _, errors = written[order]

    error = errors.splitlines()[-1]
    assert "ConfigurationError" in error, errors
    assert "import lightning.pytorch as pl" in error
    assert "lightning_unified.replace_pytorch_lightning()" in error


def test_a_library_that_imports_it_trains_once_it_is_replaced(written):
    output, errors = written[TRAINED]

    assert output.splitlines()[-1:] == ["1"], errors


def test_it_is_not_replaced_once_it_is_imported(written):
    assert "called after lightning_fabric had been imported" in written[LATE][1]
