"""Output heads of modules that are no Hugging Face models: found, computed in chunks, and left alone."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_unified.nn.lazy_logits import LazyHeads, obstacles, output_heads, rows_of, tied_heads
from lightning_unified.nn.lazy_logits.states import HiddenStates
from lightning_unified.nn.lazy_logits.tensor import LazyLogits
from tests.support.modules.decoders import CLASSES, FORMS, WIDTH, Block, Decoder

IDS = torch.arange(3, 17).reshape(2, 7)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("autocast", [False, True])
def test_loss_and_gradients_in_chunks_equal_those_of_all_logits(form, autocast):
    model = Decoder(form)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model(IDS)
        plain = gradients(model, expected)
        heads = LazyHeads(model, 5)
        loss = model(IDS)
    chunked = gradients(model, loss)
    heads.remove()

    assert model.kinds == [torch.Tensor, LazyLogits]
    torch.testing.assert_close(loss, expected)
    for name, gradient in plain.items():
        limit = (2e-2 if autocast else 1e-5) * float(gradient.abs().max())
        torch.testing.assert_close(chunked[name], gradient, rtol=0, atol=limit)
    model(IDS)
    assert model.kinds[-1] is torch.Tensor and "forward" not in vars(model.norm)


def test_heads_are_found_outside_blocks_by_their_shape():
    assert list(output_heads(Decoder("linear"))) == ["head"] and not tied_heads(Decoder("tied linear"))
    assert list(tied_heads(Decoder("functional"))) == ["norm"] and not output_heads(Decoder("functional"))
    wide = nn.Sequential(nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 10))
    few = nn.Sequential(nn.Embedding(100, 8), nn.LayerNorm(8), nn.Linear(8, 100))
    assert not output_heads(wide) and not output_heads(few) and not tied_heads(few)


class HeadFirst(nn.Module):
    """Registers the normalization before the blocks."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))


def test_no_lazy_states_may_enter_compiled_blocks():
    model = HeadFirst()
    assert list(tied_heads(model)) == ["norm"]
    for block in model.blocks:
        block.compile(backend="eager")
    assert not tied_heads(model)


def test_a_head_inside_compiled_code_is_named_and_stays_as_it_is(caplog):
    model = nn.ModuleDict({"net": Decoder("functional")})
    model["net"].compile(backend="eager")
    assert obstacles(model) == {"net.norm": "Decoder is compiled"}
    heads = LazyHeads(model, 5)
    assert heads.names == () and "net.norm stays as it is, because Decoder is compiled." in caplog.text
    heads.remove()


class Reading(Decoder):
    """Uses the hidden states and the logits in other ways than by `cross_entropy`."""

    def __init__(self, use):
        super().__init__("functional")
        self.use = use

    def forward(self, ids):
        hidden = self.norm(self.tokens(ids))
        logits = self.logits(hidden)
        loss = functional.cross_entropy(logits.reshape(-1, CLASSES), ids.flatten())
        match self.use:
            case "states":
                return loss + (hidden.pow(2).mean() + torch.cat([hidden, hidden]).sum() / 100)
            case "checkpoint":
                again = checkpoint(self.logits, hidden, use_reentrant=False)
                return loss + functional.cross_entropy(again.transpose(1, 2), ids)
            case "softmax":
                return loss + logits.softmax(-1).square().sum()
            case "written":
                hidden = hidden.mul_(3) + hidden
                return loss * 0 + functional.linear(hidden, self.tokens.weight).square().mean()
            case _:
                return functional.cross_entropy(functional.linear(hidden, self.tokens.weight * 2)[:, 0], ids[:, 0])


@pytest.mark.parametrize("use", ["states", "checkpoint", "softmax", "written", "other weight"])
def test_every_other_use_of_the_hidden_states_is_exact(use):
    model = Reading(use).double()
    if use == "written":  # a product that reads overwritten states fails without lazy logits too
        model.logits = lambda hidden: hidden @ torch.zeros(WIDTH, CLASSES, dtype=hidden.dtype)
    expected = model(IDS)
    plain = gradients(model, expected)
    heads = LazyHeads(model, 5)
    loss = model(IDS)
    chunked = gradients(model, loss)
    heads.remove()

    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(chunked, plain)


def test_hidden_states_behave_as_the_tensor_that_they_stand_for():
    model = Decoder("functional")
    heads = LazyHeads(model, 5)
    states = model.norm(torch.ones(2, 3, WIDTH))
    assert type(states) is HiddenStates and states.requires_grad and states.shape == (2, 3, WIDTH)
    assert type(states[:, 1:]) is HiddenStates and type(states.sum(-1)) is torch.Tensor
    torch.testing.assert_close(copy.deepcopy(states.detach()), states.detach())
    torch.testing.assert_close(pickle.loads(pickle.dumps(states.detach())), states.detach())
    states.retain_grad()
    states.sum().backward()
    assert states.grad.shape == states.shape and "grad_fn" in repr(states)
    with torch.no_grad():
        assert type(model.norm(torch.ones(2, 3, WIDTH))) is torch.Tensor
    heads.remove()


@pytest.mark.parametrize("form", ["linear", "functional"])
def test_copies_have_their_own_forward_and_can_be_lazy_again(form):
    model = Decoder(form)
    heads = LazyHeads(model, 5)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert rows_of(model) == 5
    heads.remove()
    for twin in twins:
        twin(IDS)
        assert twin.kinds[-1] is torch.Tensor and twin.state_dict().keys() == model.state_dict().keys()
        again = LazyHeads(twin, 5)
        twin(IDS)
        assert twin.kinds[-1] is LazyLogits
        again.remove()


class Node(torch.autograd.Function):
    """A user's autograd function, which may return what torch's operations in its forward pass make."""

    factor = 2.0

    @classmethod
    def backward(cls, ctx, grad):
        return grad * cls.factor


class Multiplied(Node):
    @staticmethod
    def forward(ctx, value):
        return value * 2


class Reversed(Node):
    factor = -1.0

    @staticmethod
    def forward(ctx, value):
        return value


class Viewed(Node):
    factor = -1.0

    @staticmethod
    def forward(ctx, value):
        return value.view(*value.shape)


class Detached(Node):
    factor = -1.0

    @staticmethod
    def forward(ctx, value):
        return value.detach()


class Overwritten(Node):
    @staticmethod
    def forward(ctx, value):
        ctx.mark_dirty(value.mul_(2))
        return value


class Applying(Decoder):
    def __init__(self, form, node, to):
        super().__init__(form)
        self.node, self.to = node, to

    def forward(self, ids):
        hidden = self.norm(self.tokens(ids))
        logits = self.logits(self.node.apply(hidden) if self.to == "hidden" else hidden)
        logits = self.node.apply(logits) if self.to == "logits" else logits
        return functional.cross_entropy(logits.reshape(-1, CLASSES), ids.flatten())


@pytest.mark.parametrize("to", ["hidden", "logits"])
@pytest.mark.parametrize("node", [Multiplied, Reversed, Viewed, Detached, Overwritten])
@pytest.mark.parametrize("form", ["linear", "functional"])
def test_gradients_pass_through_the_users_autograd_functions(form, node, to):
    model = Applying(form, node, to).double()
    expected = model(IDS)
    plain = gradients(model, expected)
    heads = LazyHeads(model, 5)
    loss = model(IDS)
    chunked = gradients(model, loss)
    heads.remove()

    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(chunked, plain)
