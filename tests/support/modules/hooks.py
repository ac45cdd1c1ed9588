"""Modules that use Lightning's hooks of automatic optimization as users do.

Each logs, records or changes something in one of them.
"""

from collections.abc import Mapping

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.support.modules.plain import Rows

EVERY = {"on_step": True, "on_epoch": True}


class Small(L.LightningModule):
    """Two linear layers and a mean over rows; `seen` records a hook's observations."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.seen: list = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, **EVERY)
        return loss

    def loss(self, batch):
        return F.cross_entropy(self.net(batch["x"]), batch["y"])

    def gradient(self):
        found = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        return torch.stack(found).norm() if found else torch.zeros(())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    @staticmethod
    def loader():
        generator = torch.Generator().manual_seed(6)
        x = torch.randn(19, 4, generator=generator, dtype=torch.float64)
        return DataLoader(Rows([{"x": row, "y": index % 3} for index, row in enumerate(x)]), batch_size=8)


class ReturnsNothingAtTimes(Small):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class ReturnsExtras(Small):
    def training_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        return {"loss": F.cross_entropy(logits, batch["y"]), "logits": logits, "targets": batch["y"]}


class _Output(Mapping):
    def __init__(self, **values) -> None:
        self.values_of = values

    def __getitem__(self, key):
        return self.values_of[key]

    def __iter__(self):
        return iter(self.values_of)

    def __len__(self) -> int:
        return len(self.values_of)


class ReturnsAMapping(Small):
    def training_step(self, batch, batch_idx):
        return _Output(loss=super().training_step(batch, batch_idx))


class BackpropagatesByItself(Small):
    """Calls autograd in `backward`, and checks the loss that it gets."""

    def backward(self, loss):
        assert loss.shape == ()
        gradients = torch.autograd.grad(2 * loss, list(self.parameters()), retain_graph=True)
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            parameter.grad = gradient / 2 if parameter.grad is None else parameter.grad + gradient / 2


class KeepsTheGraph(Small):
    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, retain_graph=True, **kwargs)


class ZeroesInPlace(Small):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.seen.append((epoch, batch_idx, float(self.gradient())))
        optimizer.zero_grad(set_to_none=False)


class AveragesWeights(Small):
    """Keeps an average of its weights in `on_before_zero_grad`.

    The hook sees the gradients of the last step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(3))

    def on_before_zero_grad(self, optimizer):
        self.average.mul_(0.9).add_(0.1 * self.net[2].bias.detach())
        self.seen.append(float(self.gradient()))


class MovesATeacher(Small):
    """Compares rows with a teacher that `on_before_zero_grad` moves.

    The same hook resets the step's count of rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 3).requires_grad_(False)
        self.rows = 0

    def loss(self, batch):
        self.rows += len(batch["x"])
        return F.mse_loss(self.net(batch["x"]), self.teacher(batch["x"]))

    def on_before_zero_grad(self, optimizer):
        self.seen.append((self.rows, float(self.gradient())))
        self.rows = 0
        self.teacher.bias.mul_(0.5).add_(self.net[2].bias.detach())


class FreezesInTheStep(Small):
    def training_step(self, batch, batch_idx):
        self.net[0].requires_grad_(batch_idx > 0)
        return super().training_step(batch, batch_idx)


class CallsTheClosureItself(Small):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        loss = optimizer_closure()
        self.seen.append(float(loss))
        optimizer.step()


class StepsEverySecondBatch(Small):
    """Calls the closure for each batch, and steps at every second batch.

    The documentation of `optimizer_step` asks for a call of the closure for each batch.
    """

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class WarmsUp(Small):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (self.trainer.global_step + 1)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class ClipsByItself(Small):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.seen.append((gradient_clip_val or 0.0, gradient_clip_algorithm == "norm", float(self.gradient())))
        self.clip_gradients(optimizer, gradient_clip_val or 0.1, gradient_clip_algorithm or "norm")


class StopsTheEpoch(Small):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


class Lbfgs(Small):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.2, max_iter=3)


class _WithoutGradients(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        super().step()
        return loss


class StepsWithoutGradients(Small):
    """Its optimizer turns gradients off around the closure, as some libraries' do."""

    def training_step(self, batch, batch_idx):
        assert torch.is_grad_enabled()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return _WithoutGradients(self.parameters(), 0.1)


class StepsTheSchedulerItself(Small):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):
        self.seen.append(self.trainer.global_step)
        scheduler.step()


class LogsEverywhere(Small):
    """Logs the given loss, or the size of the gradient, in each hook that may log."""

    def on_train_batch_start(self, batch, batch_idx):
        self.log("batch start", float(batch_idx), **EVERY)

    def on_before_zero_grad(self, optimizer):
        self.log("before zero_grad", self.gradient(), **EVERY)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.log("zero_grad", self.gradient() + 1, **EVERY)
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def on_before_backward(self, loss):
        self.log("before backward", loss, **EVERY)

    def backward(self, loss, *args, **kwargs):
        self.log("backward", loss.detach(), **EVERY)
        self.log("worst backward", loss.detach() * 0 + 3, reduce_fx="max", **EVERY)
        super().backward(loss, *args, **kwargs)

    def on_after_backward(self):
        self.log("after backward", self.gradient(), **EVERY)

    def on_before_optimizer_step(self, optimizer):
        self.log("before step", self.gradient(), **EVERY)

    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        self.log("clipping", self.gradient(), **EVERY)
        super().configure_gradient_clipping(optimizer, *args, **kwargs)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.log("step begins", self.net[2].bias.detach().sum(), **EVERY)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.log("step ends", self.net[2].bias.detach().sum(), **EVERY)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("batch end", outputs["loss"], **EVERY)


class LogsInACallback(L.Callback):
    """Logs the same values from a callback."""

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.log("callback: before zero_grad", pl_module.gradient(), **EVERY)

    def on_before_backward(self, trainer, pl_module, loss):
        self.log("callback: before backward", loss, **EVERY)

    def on_after_backward(self, trainer, pl_module):
        self.log("callback: after backward", pl_module.gradient(), **EVERY)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.log("callback: before step", pl_module.gradient(), **EVERY)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.log("callback: batch end", outputs["loss"], **EVERY)


class TwoByHand(Small):
    """Two optimizers in manual optimization, each toggled; the second steps every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        with self.toggled_optimizer(first):
            self.seen.append([parameter.requires_grad for parameter in self.parameters()])
            loss = self.loss(batch)
            first.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(first, gradient_clip_val=0.5)
            first.step()
        with second.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(self.loss(batch), retain_graph=True)
            if batch_idx % 2:
                second.step()
                second.zero_grad()
        self.log("loss", loss, **EVERY)
        return {"loss": loss.detach(), "kept": batch_idx}

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[0].parameters(), 0.1), torch.optim.Adam(self.net[2].parameters(), 0.01)


# modules that Lightning ends with an error


class ReturnsANumber(Small):
    def training_step(self, batch, batch_idx):
        return 5.0


class ReturnsNoLoss(Small):
    def training_step(self, batch, batch_idx):
        return {"logits": self.net(batch["x"])}


class ReturnsAMappingWithoutLoss(Small):
    def training_step(self, batch, batch_idx):
        return _Output(logits=self.net(batch["x"]))


class LosesItsGraph(Small):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).detach()


class NeverCallsTheClosure(Small):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        pass


class _Forgetful(torch.optim.SGD):
    def step(self, closure=None):
        return super().step()


class ForgetsTheClosure(Small):
    def configure_optimizers(self):
        return _Forgetful(self.parameters(), 0.1)


class LogsWhereNothingIsLogged(Small):
    def on_train_end(self):
        self.log("end", 1.0)
