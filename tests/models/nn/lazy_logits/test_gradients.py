"""Gradients through lazy logits are those of plain logits, or are refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from lightning_unified.nn.lazy_logits import LazyHeads, obstacles
from lightning_unified.nn.linear_cross_entropy import linear_cross_entropy
from lightning_unified.planner import predict
from tests.support.modules.decoders import CLASSES, WIDTH, Using, plain_and_lazy

IDS = torch.arange(3, 17).reshape(2, 7)
LABELS = IDS.roll(-1, 1)
NONE = torch.full_like(LABELS, -100)


def loss_of(logits, labels=LABELS, **options):
    return functional.cross_entropy(logits.reshape(-1, CLASSES), labels.flatten(), **options)


def distilled(teacher):
    """The loss, and the distance to what `teacher` makes of the logits."""

    def use(logits):
        target = teacher(logits)
        logs = logits.reshape(-1, CLASSES)[: len(target.reshape(-1, CLASSES))].log_softmax(-1)
        return loss_of(logits) - (target.reshape(-1, CLASSES) * logs).sum(-1).mean()

    return use


@torch.no_grad()
def halved(logits):
    return logits / 2


@torch.no_grad()
def viewed(logits):
    return logits.view(-1, CLASSES)


@pytest.mark.parametrize("form", ["linear", "functional"])
@pytest.mark.parametrize(
    "use",
    [
        distilled(lambda logits: (logits.detach() / 2).softmax(-1)),
        distilled(lambda logits: logits.detach()[:, :3].contiguous().softmax(-1)),
        distilled(lambda logits: logits.detach().float().softmax(-1)),
        distilled(lambda logits: halved(logits).softmax(-1)),
        distilled(lambda logits: viewed(logits).softmax(-1)),
        lambda logits: (logits - logits.detach() * 2).square().mean(),
    ],
)
def test_no_gradient_flows_through_detached_logits(form, use):
    torch.testing.assert_close(*plain_and_lazy(Using(form).double(), IDS, use))


@pytest.mark.parametrize("form", ["linear", "functional"])
@pytest.mark.parametrize(
    "use",
    [
        lambda logits: loss_of(logits, NONE),
        lambda logits: loss_of(logits * 1.5, NONE),
        lambda logits: loss_of(logits, NONE, weight=torch.linspace(1, 2, CLASSES, dtype=logits.dtype)),
        lambda logits: loss_of(logits, NONE, label_smoothing=0.1),
        lambda logits: torch.where(torch.tensor(True), loss_of(logits), loss_of(logits, NONE)),
    ],
)
def test_a_batch_without_a_scored_label_has_the_loss_and_gradients_of_torch(form, use):
    torch.testing.assert_close(*plain_and_lazy(Using(form).double(), IDS, use), equal_nan=True)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("chunk", [None, 3])
def test_the_operator_without_a_scored_label_has_gradients_of_zero(chunk, frozen):
    hidden = torch.randn(6, 8, requires_grad=True)
    weight = torch.randn(11, 8, requires_grad=not frozen)
    loss = linear_cross_entropy(hidden, weight=weight, labels=torch.full((6,), -100), chunk_rows=chunk)
    loss.backward()

    assert loss.isnan()
    assert not hidden.grad.any() and (frozen or not weight.grad.any())


@pytest.mark.parametrize("form", ["linear", "functional"])
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_a_second_derivative_is_refused(form, scale):
    model = Using(form).double()
    heads = LazyHeads(model, 5)
    loss = model(IDS, lambda logits: loss_of(logits * scale))
    with pytest.raises(RuntimeError, match=r"loss in chunks has no second derivative .* set memory\.loss_chunk=false"):
        torch.autograd.grad(loss, model.norm.weight, create_graph=True)
    heads.remove()


@pytest.mark.parametrize("chunk", [None, 3])
def test_the_operator_refuses_a_second_derivative(chunk):
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight=weight, labels=torch.arange(6), chunk_rows=chunk)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize(
    "ask",
    [
        lambda logits, loss: logits.register_hook(lambda gradient: gradient * 2),
        lambda logits, loss: logits.retain_grad(),
        lambda logits, loss: torch.autograd.grad(loss, logits),
        lambda logits, loss: torch.autograd.grad(loss, inputs=[logits]),
    ],
)
def test_the_gradient_of_logits_is_refused_after_their_loss_and_right_before_it(ask):
    model = Using().double()
    heads = LazyHeads(model, 5)
    logits = model(IDS, lambda logits: logits)
    loss = loss_of(logits * 1.5)
    with pytest.raises(RuntimeError, match=r"asks for the gradient of the logits of Linear, .* before, without them"):
        ask(logits, loss)
    heads.remove()

    def clamped(logits):
        logits.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
        return loss_of(logits)

    torch.testing.assert_close(*plain_and_lazy(model, IDS, clamped))


class Counted(nn.Module):
    """A parametrization with a state that each evaluation changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, weight):
        self.count += 1
        return weight * 1.0


NORMED = {
    "weight norm": weight_norm,
    "spectral norm": spectral_norm,
    "parametrized spectral norm": parametrizations.spectral_norm,
    "parametrized": lambda layer: parametrize.register_parametrization(layer, "weight", Counted()),
}


@pytest.mark.parametrize("kind", NORMED)
def test_a_head_whose_weight_is_computed_stays_as_it_is(kind):
    models = [Using().double() for _ in range(2)]
    for model in models:
        model.norm.weight.requires_grad_(False)
        torch.manual_seed(1)
        model.head = NORMED[kind](model.head)
    assert obstacles(models[0]) == {"head": "its weight is computed from other parameters"}
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    results = []
    for model, is_lazy in zip(models, (False, True), strict=True):
        heads = LazyHeads(model, 5) if is_lazy else None
        for _ in range(2):
            model(IDS, lambda logits: loss_of(logits * temperature)).backward()
        if heads is not None:
            heads.remove()
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        results.append([temperature.grad, *grads, *model.buffers()])
        temperature.grad = None

    torch.testing.assert_close(*results)


def test_planning_evaluates_no_parametrized_weight():
    import lightning as L

    class Normed(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
            self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
            for layer in (self.net, self.norm, self.table, self.head):
                parametrize.register_parametrization(layer, "weight", Counted())

        def training_step(self, batch, batch_idx):
            return loss_of(self.head(self.norm(self.net(self.table(batch)))))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Normed()
    before = [one.clone() for one in module.buffers()]
    predict.plan(module, IDS, budget="1GiB", device="cuda")

    assert all(map(torch.equal, before, module.buffers()))


@pytest.mark.parametrize("form", ["linear", "functional"])
def test_transforms_of_torch_func_get_plain_logits(form):
    model = Using(form).double()
    weights = {name: one.detach() * 0.5 for name, one in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (IDS, loss_of))

    plain = torch.func.grad(loss)(weights)
    heads = LazyHeads(model, 5)
    lazy = torch.func.grad(loss)(weights)
    called = loss({name: one.requires_grad_() for name, one in weights.items()})
    gradients = dict(zip(weights, torch.autograd.grad(called, list(weights.values()), allow_unused=True), strict=True))
    heads.remove()

    torch.testing.assert_close(lazy, plain)
    gradients = {name: plain[name] * 0 if one is None else one for name, one in gradients.items()}
    torch.testing.assert_close(gradients, plain)


def test_an_array_of_numpy_may_index_positions_and_classes():
    mask = (IDS % 2 == 0).numpy()

    def use(logits):
        return functional.cross_entropy(logits[mask, :1000], IDS[IDS % 2 == 0])

    torch.testing.assert_close(*plain_and_lazy(Using().double(), IDS, use))
