"""A step, and hooks of its batch, read logged values during the batch.

The values are those of plain Lightning at that moment.
"""

import lightning as L
import pytest
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells
from tests.support.modules.plain import fit, weights
from tests.support.modules.split import Net


class Logs(Net):
    """Logs its loss and a constant, and scales the loss by `scale`."""

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("loss", loss, prog_bar=True)
        self.log("twice", 2.0, on_step=True, on_epoch=True)
        return loss * self.scale()

    def scale(self):
        return 1.0


class ReadsConstant(Logs):
    def scale(self):
        trainer = self.trainer
        assert "loss" in trainer.progress_bar_metrics
        return float(trainer.callback_metrics["twice"]) * float(trainer.logged_metrics["twice_step"])


class ReadsLoss(Logs):
    def scale(self):
        return float(self.trainer.callback_metrics["loss"])


class Reader(L.Callback):
    def __init__(self, hook):
        self.seen = []
        setattr(self, hook, lambda trainer, *_: self.seen.append(float(trainer.callback_metrics["loss"])))


def test_a_step_reads_what_it_has_just_logged():
    plain, split = ReadsConstant().double(), ReadsConstant().double()
    split.load_state_dict(plain.state_dict())
    fit(plain, Logs.loader(), strategy="auto")
    fit(split, Logs.loader(), strategy=UnifiedStrategy(micro_batch_size=3))

    assert weights(split).numpy() == pytest.approx(weights(plain).numpy(), rel=1e-9)


def test_a_step_that_scales_its_loss_by_a_log_of_its_rows_is_refused():
    with pytest.raises(SplitError, match="ReadsLoss cannot be split exactly"):
        fit(ReadsLoss().double(), Logs.loader(), strategy=UnifiedStrategy(micro_batch_size=3))


@first_cells(1, "hook", ["on_before_zero_grad", "on_after_backward", "on_before_optimizer_step"])
def test_hooks_read_the_whole_batchs_log(hook):
    seen, module = [], Logs().double()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for strategy in ("auto", UnifiedStrategy(micro_batch_size=3)):
        module.load_state_dict(before)
        reader = Reader(hook)
        fit(module, Logs.loader(), strategy=strategy, callbacks=[reader])
        seen.append(reader.seen)

    assert len(set(seen[0])) == len(seen[0]) > 3
    assert seen[1] == pytest.approx(seen[0], rel=1e-9)
