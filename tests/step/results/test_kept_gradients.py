"""Gradients that activations keep (`retain_grad()`), read by hooks after a split batch's backward passes."""

import pytest
from torch.nn import functional as F

from tests.support.modules.split import Net
from tests.support.runs.split_and_whole import same_cut_and_whole


class Keeps(Net):
    """Keeps some activations with their gradients, and logs these."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.kept(batch["x"]), batch["y"])

    def on_after_backward(self):
        for index, one in enumerate(self.activations()):
            self.log(f"norm {index}", one.grad.norm())
            self.log(f"entries {index}", float(one.grad.numel()))


class Attribute(Keeps):
    def kept(self, x):
        self.hidden = self.net[0](x)
        self.hidden.retain_grad()
        return self.net[1:](self.hidden)

    def activations(self):
        return [self.hidden]


class Hooked(Keeps):
    def __init__(self):
        super().__init__()
        self.outputs = []
        for layer in self.net:
            layer.register_forward_hook(self.append)

    def append(self, layer, inputs, output):
        output.retain_grad()
        self.outputs.append(output)

    def kept(self, x):
        self.outputs.clear()
        return self.net(x)

    def activations(self):
        return self.outputs


class Input(Keeps):
    """The leaf of a graph keeps its gradient unasked."""

    def kept(self, x):
        self.x = x.clone().requires_grad_()
        return self.net(self.x)

    def activations(self):
        return [self.x]


class Shared(Keeps):
    """Every micro-batch makes an equal tensor, whose gradients add up."""

    def kept(self, x):
        self.weight = self.net[0].weight * 2
        self.weight.retain_grad()
        return self.net[1:](F.linear(x, self.weight))

    def activations(self):
        return [self.weight]


class OwnBackward(Attribute):
    def backward(self, loss, *args, **kwargs):
        loss.backward()


class Returned(Net):
    """Returns activations with their gradients, which a hook reads."""

    def training_step(self, batch, batch_idx):
        weight = self.net[0].weight * 2
        hidden = F.linear(batch["x"], weight)
        weight.retain_grad()
        hidden.retain_grad()
        return {"loss": F.cross_entropy(self.net[1:](hidden), batch["y"]), "kept": [hidden, weight]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for index, one in enumerate(outputs["kept"]):
            self.log(f"norm {index}", one.grad.norm())


class ReturnedOwnBackward(Returned):
    backward = OwnBackward.backward


class OfBatch(Net):
    """Differentiates the rows of its batch."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch["x"].requires_grad_()), batch["y"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("norm", batch["x"].grad.norm())


class OfBatchOwnBackward(OfBatch):
    backward = OwnBackward.backward


KINDS = [Attribute, Hooked, Input, Shared, OwnBackward, Returned, ReturnedOwnBackward, OfBatch, OfBatchOwnBackward]


@pytest.mark.parametrize("kind", KINDS)
def test_kept_gradients_are_those_of_the_whole_batch(kind):
    same_cut_and_whole(kind)
