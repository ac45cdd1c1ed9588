"""State that a step keeps in the attributes of a class that is not its module's."""

import pytest
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.modules.split import Net, run
from tests.support.runs.split_and_whole import same_cut_and_whole


class Globals:
    step = 0
    centres = False
    losses: list = []


class Counts(Net):
    """Counts in a class, and weights its loss by the count."""

    def on_fit_start(self):
        Globals.step = 0
        Globals.losses.clear()

    def loss(self, out, batch):
        Globals.step += 1
        loss = F.cross_entropy(out, batch["y"]) / Globals.step
        Globals.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *_):
        self.log("count", float(Globals.step))
        self.log("kept", float(len(Globals.losses)))
        self.log("last", Globals.losses[-1])


class Centres(Net):
    def on_train_epoch_start(self):
        Globals.centres = self.current_epoch > 0

    def training_step(self, batch, batch_idx):
        hidden = self.net[0](batch["x"])
        hidden = hidden - hidden.mean(0) if Globals.centres else hidden
        return F.cross_entropy(self.net[1:](hidden), batch["y"])


def test_what_a_step_writes_in_a_class_is_written_once_a_batch():
    same_cut_and_whole(Counts)


def test_a_switch_in_a_class_is_seen():
    with pytest.raises(SplitError, match="cannot be split exactly"):
        run(Centres, strategy=UnifiedStrategy(micro_batch_size=3), max_epochs=2)
