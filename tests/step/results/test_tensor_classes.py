"""Tensors of a class whose operations return plain ones, as torchvision's `Image` and `BoundingBoxes`."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.step.split.containers import with_class_of

KEPT = (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.to, torch.Tensor.requires_grad_)
CPU = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


class Picture(torch.Tensor):
    """A tensor with a format, whose class only a few operations keep."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return picture(result, args[0].format) if func in KEPT and isinstance(args[0], cls) else result


def picture(tensor, form="rgb"):
    made = tensor.as_subclass(Picture)
    made.format = form
    return made


class Net(L.LightningModule):
    """Steps on pictures; a prediction has more than 4,096 entries, and its smallest micro-batch fewer."""

    def __init__(self):
        super().__init__()
        self.net, self.seen = nn.Linear(48, 2), []

    def scores(self, batch):
        self.seen.append((type(batch), getattr(batch, "format", None)))
        return self.net(batch.flatten(1))

    def training_step(self, batch, batch_idx):
        scores = self.scores(batch)
        return {"loss": scores.square().mean(), "pictures": batch.detach()}

    def predict_step(self, batch, batch_idx):
        return {"pictures": picture(batch.repeat(1, 1, 1, 40), "bgr"), "scores": self.scores(batch)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Last(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs = outputs


def pictures():
    rows = torch.randn(7, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=7, collate_fn=lambda batch: picture(torch.stack(batch)))


def test_micro_batches_and_merged_outputs_keep_the_class():
    net, last = Net(), Last()
    strategy = UnifiedStrategy(micro_batch_size=3)
    L.Trainer(strategy=strategy, max_epochs=1, callbacks=[last], enable_model_summary=False, **CPU).fit(net, pictures())

    assert set(net.seen) == {(Picture, "rgb")}
    assert (type(last.outputs["pictures"]), last.outputs["pictures"].format) == (Picture, "rgb")
    assert len(last.outputs["pictures"]) == 7


def test_predictions_keep_the_class():
    net = Net()
    (plain,) = L.Trainer(**CPU).predict(net, pictures())
    (mine,) = L.Trainer(strategy=UnifiedStrategy(evaluation_micro_batch_size=3), **CPU).predict(net, pictures())

    assert (type(mine["pictures"]), mine["pictures"].format) == (Picture, "bgr")
    assert torch.equal(*(found["pictures"].as_subclass(torch.Tensor) for found in (mine, plain)))
    torch.testing.assert_close(mine["scores"], plain["scores"])


@pytest.mark.parametrize("value", [[1, 2], torch.zeros(2)])
def test_a_tensor_stays_plain_where_its_attributes_may_have_rows(value):
    like = picture(torch.zeros(2), value)
    assert type(with_class_of(like, torch.zeros(1))) is torch.Tensor
