"""Subjects of `plan`: modules without weights, and batches by shape.

Batches come from data and from a user's own functions.
"""

import re

import pytest
import torch
from lightning import LightningDataModule, LightningModule

from lightning_unified.cli.config.composition import composed, searching
from lightning_unified.cli.plan.arguments import parse
from lightning_unified.cli.plan.example_batches import batch_of_data, batch_of_shapes, describe_batch
from lightning_unified.cli.plan.subject import subject_of
from lightning_unified.cli.plan.weightless import without_memory
from lightning_unified.data import TextData
from lightning_unified.errors import ConfigurationError
from tests.support import ROOT
from tests.support.lanes import first_cells

CONF = str(ROOT / "conf")
MINE = f"{__file__}:"


class Net(LightningModule):
    def __init__(self, width=4, depth=1):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))


class ReadsItself(LightningModule):
    """Computes drop rates as stochastic depth does, and holds a large weight besides."""

    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.big = torch.nn.Linear(1000, 1000)


class ReadsItsWeights(LightningModule):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Linear(1000, 1000).weight.norm().item()


def plain():
    return torch.nn.Linear(2, 2)


no_batch = {"x": 3}


def test_a_module_that_reads_its_small_tensors_is_built_with_its_large_ones_on_meta():
    module = without_memory(ReadsItself, what="it")

    assert module.rates == pytest.approx([0, 0.25, 0.5])
    assert module.big.weight.device.type == "meta"


def test_a_module_that_reads_its_large_tensors_is_refused_with_a_way_out():
    with pytest.raises(ConfigurationError, match="it cannot be built without memory: it reads values of large tensors"):
        without_memory(ReadsItsWeights, what="it")


def test_an_error_of_the_module_s_own_is_not_taken_for_one_of_memory():
    def build():
        raise ValueError("width must be even")

    with pytest.raises(ValueError, match="width must be even"):
        without_memory(build, what="it")


def test_shapes_make_a_dict_a_tensor_or_a_tuple():
    named = batch_of_shapes(["ids=8x16:int64", "x=8"])

    assert (named["ids"].shape, named["ids"].dtype, named["x"].dtype) == ((8, 16), torch.int64, torch.float32)
    assert batch_of_shapes(["2x3x4"]).shape == (2, 3, 4)
    assert [tensor.dtype for tensor in batch_of_shapes(["2x3", "2:int64"])] == [torch.float32, torch.int64]
    assert describe_batch(named) == "8 rows: ids 8×16 int64, x 8 float32"


def test_text_data_gives_its_batch_without_reading_a_document(monkeypatch):
    monkeypatch.setattr(
        "lightning_unified.data.sources.corpora.load", lambda *_, **__: pytest.fail("documents were read")
    )
    batch, note = batch_of_data(TextData(batch_size=3, sequence_length=16))

    assert batch["input_ids"].shape == (3, 16) and "no data was read" in note


def test_a_batch_by_its_shapes_is_like_one_that_was_read():
    data = TextData(source="builtin", batch_size=4, sequence_length=128, vocab_size=512)
    data.setup()
    read, example = next(iter(data.train_dataloader())), data.example_batch()

    assert {name: tensor.dtype for name, tensor in read.items()} == {
        name: tensor.dtype for name, tensor in example.items()
    }
    assert all(read[name].shape <= tensor.shape for name, tensor in example.items())


def test_other_data_gives_the_first_batch_it_trains_on():
    class Data(LightningDataModule):
        def setup(self, stage):
            self.rows = torch.arange(6.0).reshape(6, 1)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(self.rows, batch_size=4)

    batch, note = batch_of_data(Data())

    assert batch.shape == (4, 1) and "first of the training data" in note


MISTAKES_OF_A_SUBJECT = {
    "a path without a name": (["--module", "my.models", "--batch-shape", "2"], "write pkg.mod:Name or file.py:Name"),
    "a module that is not there": (
        ["--module", "no_such_package:Net", "--batch-shape", "2"],
        "cannot be imported from",
    ),
    "a file that is not there": (
        ["--module", "nowhere.py:Net", "--batch-shape", "2"],
        "nowhere.py: there is no such file",
    ),
    "a misspelt name": (["--module", f"{MINE}Nett", "--batch-shape", "2"], "has no Nett; did you mean Net?"),
    "a misspelt argument": (
        ["--module", f"{MINE}Net", "--batch-shape", "2", "--kwargs", "widht=3"],
        "--kwargs widht: ",
    ),
    "an override among the arguments": (
        ["--module", f"{MINE}Net", "--batch-shape", "2", "--kwargs", "width=3", "memory=small"],
        "Overrides stand before this flag.",
    ),
    "a module without Lightning": (
        ["--module", f"{MINE}plain", "--batch-shape", "2"],
        "it makes a Linear, and a plan needs a LightningModule",
    ),
    "a batch without tensors": (
        ["--module", f"{MINE}Net", "--batch", f"{MINE}no_batch"],
        "without tensors is no batch",
    ),
    "a shape that is none": (
        ["--batch-shape", "ids=8by3"],
        "--batch-shape ids=8by3: this is no shape; write sizes",
    ),
    "a misspelt dtype": (
        ["--batch-shape", "8x3:flaot32"],
        "flaot32 is no dtype of torch; did you mean float32?",
    ),
    "half of the names": (["--batch-shape", "a=8", "8"], "some shapes have names and others none"),
    "a name given twice": (["--batch-shape", "a=8", "a=8"], "a name is given twice"),
}


@pytest.fixture(scope="module")
def config():
    with searching(CONF):
        return composed(["hardware=cpu", "data=builtin", "run_dir=here", "hardware.num_workers=0"]).config


@first_cells(3, "name", MISTAKES_OF_A_SUBJECT)
def test_a_mistake_of_module_or_batch_is_refused(config, name):
    arguments, message = MISTAKES_OF_A_SUBJECT[name]
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        subject_of(parse(arguments), config, precision="32-true")


def test_a_callback_may_refer_to_one_that_a_plan_leaves_out():
    with searching(CONF):
        config = composed(["model=classifier-tiny", "hardware=cpu", "run_dir=here"]).config
    asked = parse(["--module", f"{MINE}Net", "--batch-shape", "2x4"])

    (stopping,) = subject_of(asked, config, precision="32-true").trainer.early_stopping_callbacks

    assert stopping.monitor == config.callbacks.checkpoint.monitor
