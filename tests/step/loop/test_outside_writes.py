"""What a step writes outside its module: entries of its batch, and the order to stop."""

import lightning as L
import pytest
import torch
from torch.nn import functional as F

from lightning_unified.errors import SplitError
from tests.support.lasting import Lasting
from tests.support.modules.plain import weights
from tests.support.modules.split import Net
from tests.support.runs.schedules import batches, run


class Stores(Net):
    """Leaves its predictions in the batch, takes the labels out, and reads both after the step."""

    def on_fit_start(self):
        self.seen = []

    def training_step(self, batch, batch_idx):
        labels = batch.pop("y")
        batch["out"], batch["temperature"] = self.net(batch["x"]), 0.5
        return F.cross_entropy(batch["out"], labels)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append((sorted(batch), batch["out"].detach().clone(), batch["temperature"]))

    @property
    def outs(self):
        return torch.cat([out for _, out, _ in self.seen])


class StoresAMean(Stores):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        batch["mean"] = batch["out"].mean()
        return loss


class Returned(Net):
    """Puts its loss into its batch, and returns the batch."""

    def on_fit_start(self):
        self.seen = []

    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"])
        batch["loss"], batch["scale"] = F.cross_entropy(out, batch["y"]), out.abs().mean()
        return batch

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert torch.equal(outputs["loss"], batch["loss"]) and torch.equal(outputs["scale"], batch["scale"])
        self.seen.append((batch["loss"].detach().clone(), batch["scale"].detach().clone()))


class Otherwise(Returned):
    """Returns another scale than it puts into its batch."""

    def training_step(self, batch, batch_idx):
        return {**super().training_step(batch, batch_idx), "scale": 2 * batch["scale"]}


class Stops(Net):
    """Stops in the step, by a value that is the same in all micro-batches or not."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.stops(batch, batch_idx):
            self.trainer.should_stop = True
        return loss


class StopsByIndex(Stops):
    def stops(self, batch, batch_idx):
        return batch_idx == 2


class StopsByRows(Stops):
    def stops(self, batch, batch_idx):
        return batch_idx == 2 and bool((batch["y"] == 3).any())


class Signalled(L.Callback):
    """Stops in the middle of a step, as the handler of a signal may."""

    calls = Lasting()

    def on_train_start(self, trainer, pl_module):
        def handle(*_):
            self.calls += trainer.global_step == 2
            if trainer.global_step == 2 and self.calls == 2:
                trainer.should_stop = True

        pl_module.net[0].register_forward_pre_hook(handle)


class Vector(Net):
    """Returns a loss of shape (1,)."""

    def on_fit_start(self):
        self.shapes = []

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).reshape(1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.shapes.append(outputs["loss"].shape)


def test_entries_that_a_step_writes_into_its_batch_are_the_whole_batchs():
    plain, _ = run(Stores, batches(number=3), strategy="auto")
    split, _ = run(Stores, batches(number=3))

    assert [(names, value) for names, _, value in split.seen] == [(["out", "temperature", "x"], 0.5)] * 3
    torch.testing.assert_close(split.outs, plain.outs)


def test_an_entry_that_nothing_puts_together_is_refused():
    with pytest.raises(SplitError, match=r"training_step writes batch\['mean'\]"):
        run(StoresAMean, batches(number=3))


def test_entries_that_a_step_also_returns_are_the_merged_outputs():
    plain, _ = run(Returned, batches(number=3), strategy="auto")
    split, _ = run(Returned, batches(number=3))

    torch.testing.assert_close(split.seen, plain.seen)
    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-9, atol=1e-12)


def test_an_entry_that_differs_from_what_the_step_returns_is_refused():
    with pytest.raises(SplitError, match=r"training_step writes batch\['scale'\]"):
        run(Otherwise, batches(number=3))


class LeavesMeans(Net):
    """Leaves means over its rows in the batch, which no hook reads."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"])
        batch["mean"] = out.mean()
        return F.cross_entropy(out, batch["y"])


class Counts(L.Callback):
    """Gets the batch, and leaves it alone."""

    count = Lasting(0)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.count += 1


class Passes(L.Callback):
    """Passes all arguments on."""

    def on_train_batch_end(self, *args, **kwargs):
        super().on_train_batch_end(*args, **kwargs)


class Keeps(Counts):
    """Keeps the batch before the step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batch = batch


def test_entries_that_no_hook_reads_are_left_out():
    plain, _ = run(LeavesMeans, batches(number=3), strategy="auto")
    split, _ = run(LeavesMeans, batches(number=3), callbacks=[Counts()])

    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("callback", [Passes, Keeps])
def test_entries_that_a_hook_may_read_are_refused_where_they_do_not_merge(callback):
    with pytest.raises(SplitError, match=r"training_step writes batch\['mean'\]"):
        run(LeavesMeans, batches(number=3), callbacks=[callback()])


def test_a_step_stops_the_trainer_once_for_the_batch():
    plain, trainer = run(StopsByIndex, batches(number=6), strategy="auto")
    split, other = run(StopsByIndex, batches(number=6))

    assert (other.global_step, other.should_stop) == (trainer.global_step, trainer.should_stop) == (3, True)
    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-9, atol=1e-12)


def test_micro_batches_that_differ_in_stopping_are_refused():
    with pytest.raises(SplitError, match=r"sets trainer\.should_stop for some micro-batches"):
        run(StopsByRows, batches(number=6))


def test_an_order_to_stop_from_outside_the_step_is_kept():
    _, trainer = run(Net, batches(number=6), callbacks=[Signalled()])

    assert (trainer.global_step, trainer.should_stop) == (3, True)


def test_a_loss_keeps_its_shape():
    assert [run(Vector, batches(number=2), **one)[0].shapes for one in ({"strategy": "auto"}, {})] == [[(1,)] * 2] * 2
