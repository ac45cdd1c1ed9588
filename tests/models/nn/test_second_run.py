"""The second run of a block that is no pure function of its arguments computes what the first did."""

import copy
import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointError, checkpoint

from lightning_unified.errors import RecomputationError
from lightning_unified.nn.checkpoint import recompute
from lightning_unified.nn.recomputing import Recomputing
from lightning_unified.nn.second_run.runs import BothRuns, Calls, named_errors
from tests.support.lanes import first_cells

WIDTH = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def inner(self, x):
        return self.linear(self.norm(x)).sin()

    def forward(self, x):
        return x + self.inner(x)


class Net(nn.Module):
    kind = Block

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.kind() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *args):
        x = self.last(x)
        for layer in self.layers:
            x = layer(x, *args)
        return x

    def step(self, x):
        """Return a loss; state changes between its forward passes and after them."""
        return self(x).square().mean()


class Memory(Block):
    """Keeps a memory from call to call, as Transformer-XL does."""

    memory = None

    def forward(self, x):
        memory = 0.0 if self.memory is None else self.memory
        self.memory = (memory * 0.5 + x * 0.5).detach()
        return x + self.inner(x + memory)


class Cached(Block):
    """Keeps its inputs in a list within a dict."""

    def __init__(self):
        super().__init__()
        self.cache = {"inputs": [], "recent": deque(maxlen=2)}

    def forward(self, x):
        self.cache["inputs"].append(x.detach())
        self.cache["recent"].append(x.detach())
        return x + self.inner(torch.stack([*self.cache["inputs"], *self.cache["recent"]]).mean(0))


class Adapted(Block):
    def __init__(self):
        super().__init__()
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "ab"})
        self.active = "a"

    def forward(self, x):
        return x + self.inner(x) + self.adapters[self.active](x)


class Conditioned(Block):
    condition = None

    def forward(self, x):
        return x + self.inner(x * self.condition)


class Annealed(Block):
    def __init__(self):
        super().__init__()
        self.temperature = torch.ones(())  # no buffer

    def forward(self, x):
        return x + (self.inner(x) / self.temperature.item()).softmax(-1)


class Counting(Block):
    calls = 0

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(())

    def forward(self, x):
        self.calls += 1
        self.total += 1
        return x + self.inner(x / (self.calls + self.total))


class Modal(Block):
    def forward(self, x):
        return x + self.inner(x.sin() if self.norm.training else x.cos())


class Memoised(Block):
    def __init__(self):
        super().__init__()
        self.weight, self.memo = nn.Parameter(torch.ones(WIDTH)), None

    def forward(self, x):
        if self.memo is None:
            self.memo = (self.weight * 2).tanh()
        return x + self.inner(x) * self.memo


class NumPys(Block):
    def forward(self, x):
        return x + self.inner(x * np.random.rand()) if np.random.rand() > 0.4 else x


class OwnGenerators(Block):
    def __init__(self):
        super().__init__()
        self.generators = [random.Random(1), np.random.default_rng(1), np.random.RandomState(1)]
        self.torchs = torch.Generator().manual_seed(1)

    def forward(self, x):
        first, second, third = self.generators
        noise = torch.rand(len(x), 1, generator=self.torchs) + first.random() + second.random() + third.rand()
        return x + self.inner(x * noise)


def net_of(kind, step=None, **methods):
    return type("Net", (Net,), {"kind": kind, **({} if step is None else {"step": step}), **methods})


def twice(change):
    """Return a step of two forward passes, with `change(block, number)` before each of them and at the end."""

    def step(self, x):
        loss = 0.0
        for number in range(3):
            for layer in self.layers:
                change(layer, number)
            loss = loss + (self(x / (1 + number)).square().mean() if number < 2 else 0.0)
        return loss

    return step


def condition(layer, number):
    layer.condition = None if number == 2 else torch.full((), 1.0 + number)


def halve(layer, _):
    layer.temperature.mul_(0.5)


NETS = {
    "memory": net_of(Memory, twice(lambda *_: None)),
    "cache": net_of(Cached, twice(lambda *_: None)),
    "adapter": net_of(Adapted, twice(lambda layer, number: setattr(layer, "active", "ab"[number % 2]))),
    "condition": net_of(Conditioned, twice(condition)),
    "annealed tensor": net_of(Annealed, twice(halve)),
    "counter": net_of(Counting),
    "mode of a part": net_of(Modal, twice(lambda layer, number: layer.norm.train(number == 0))),
    "memoised": net_of(Memoised, twice(lambda layer, number: number or setattr(layer, "memo", None))),
    "NumPy's generator": net_of(NumPys),
    "own generators": net_of(OwnGenerators),
}


def trained(net, *, recomputes):
    """Train two steps; return all that recomputation must leave equal."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    results = []
    with Recomputing(net.layers if recomputes else []):
        for _ in range(2):
            loss = net.step(torch.randn(4, WIDTH))
            loss.backward()
            optimizer.step()
            results += [
                loss.detach(),
                *(parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None),
            ]
            optimizer.zero_grad()
    return [*results, torch.rand(1), torch.tensor([random.random(), np.random.rand()])]


def assert_as_plain(kind):
    torch.manual_seed(0)
    plain = kind()
    again = copy.deepcopy(plain)
    expected, found = trained(plain, recomputes=False), trained(again, recomputes=True)
    assert len(expected) == len(found)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    return plain, again


@first_cells(4, "kind", NETS.values(), ids=NETS)
def test_gradients_are_those_without_recomputation(kind):
    assert_as_plain(kind)


def test_state_afterwards_is_that_of_one_run():
    plain, again = assert_as_plain(NETS["counter"])
    assert [layer.calls for layer in again.layers] == [layer.calls for layer in plain.layers] == [2, 2, 2]
    assert [layer.total.item() for layer in again.layers] == [2, 2, 2]

    plain, again = assert_as_plain(NETS["cache"])
    assert [len(layer.cache["inputs"]) for layer in again.layers] == [4, 4, 4]

    plain, again = assert_as_plain(NETS["own generators"])
    assert again.layers[0].generators[0].random() == plain.layers[0].generators[0].random()


def test_containers_that_a_block_is_given_are_written_once():
    class Popping(Block):
        def forward(self, x, skips, seen, losses):
            seen["count"] = seen.get("count", 0) + 1
            x = x + self.inner(x * skips.pop() / seen["count"])
            losses.append(x.mean())
            return x

    def step(self, x):
        seen, losses = {}, []
        y = self(x, [x, x * 2, x * 3], seen, losses)
        self.seen, self.count = seen, losses
        return y.square().mean() + sum(losses)

    _, again = assert_as_plain(net_of(Popping, step))
    assert again.seen == {"count": 3}
    assert len(again.count) == 3


def _maml(self, x):
    weights = dict(self.named_parameters())
    loss = functional_call(self, weights, (x,)).square().mean()
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    moved = {name: weight - 0.5 * one for (name, weight), one in zip(weights.items(), gradients, strict=True)}
    return functional_call(self, moved, (x / 2,)).square().mean()


def _halved(self, x):
    return functional_call(self, {name: one * 0.5 for name, one in self.named_parameters()}, (x,)).square().mean()


class _Noisy(nn.Module):
    def forward(self, weight):
        return weight + torch.randn_like(weight) / 10


class Parametrized(Block):
    def __init__(self):
        super().__init__()
        parametrize.register_parametrization(self.linear, "weight", _Noisy(), unsafe=True)


def _cached(self, x):
    with parametrize.cached():
        return self(x).square().mean() + self(x / 2).square().mean()


@pytest.mark.parametrize(
    "kind",
    [net_of(Block, _maml), net_of(Block, _halved), net_of(Parametrized, _cached)],
    ids=["gradients of gradients", "other weights", "parametrize.cached"],
)
def test_weights_that_a_block_was_lent_are_those_of_its_first_run(kind):
    assert_as_plain(kind)


def test_inside_transforms_of_torch_func_a_block_runs_once_and_that_is_said_once(caplog):
    def step(self, x):
        weights = dict(self.named_parameters())
        gradients = torch.func.grad(lambda one: functional_call(self, one, (x,)).square().mean())(weights)
        rows = torch.func.vmap(lambda row: self(row))(x)
        return rows.square().mean() + sum(one.detach().mean() for one in gradients.values())

    assert_as_plain(net_of(Block, step))

    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "Block is called inside a transform of torch.func, where torch cannot checkpoint: it is not recomputed."
    ]


class _Positions(Block):
    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x += self.positions
        return x + self.inner(x)


class _Rectified(Block):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.inner(self.relu(x) * 0.5) + 0.1


class _Dropped(Block):
    def forward(self, x):
        return x + self.inner(nn.functional.dropout(x, 0.3, inplace=True))


@pytest.mark.parametrize("kind", [_Positions, _Rectified, _Dropped])
def test_a_block_may_write_its_argument_in_place(kind):
    assert_as_plain(net_of(kind))


def test_a_first_call_keeps_no_copy_of_an_argument_that_is_not_written():
    block, x = Block(), torch.randn(4, WIDTH, requires_grad=True) * 1
    kept = []
    with (
        Recomputing([block]),
        torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one),
    ):
        block(x)
        block(x)

    assert [one.untyped_storage().nbytes() for one in kept] == [4, 4 * x.numel()]
    assert kept[1] is x


@pytest.mark.parametrize("hides", [False, True], ids=["other output", "output as before"])
def test_a_block_whose_second_run_reads_another_value_is_refused_by_name(hides):
    class Hidden(Block):
        scale = 1.0

        def forward(self, x):
            y = self.inner((x if hides else x + 1) * Hidden.scale)
            return y if hides else y * Hidden.scale

    block = Hidden()
    block.norm.eps = 0.0  # the output does not depend on the scale
    with Recomputing([block]):
        Hidden.scale = 4.0
        y = block(torch.randn(4, WIDTH, requires_grad=True))
        Hidden.scale = 1.0
        with pytest.raises(RecomputationError, match=r"Hidden computed other values .*recompute=False") as caught:
            y.sum().backward()

    assert caught.value.kind is Hidden


def test_calls_1_to_4_and_powers_of_two_are_compared():
    class Watched(Block):
        wrong = False

        def forward(self, x):
            return self.inner(x + Watched.wrong)

    block, refused = Watched(), []
    with Recomputing([block]):
        for call in range(1, 18):
            y = block(torch.randn(4, WIDTH, requires_grad=True))
            Watched.wrong = True
            try:
                y.sum().backward()
            except RecomputationError:
                refused.append(call)
            Watched.wrong = False

    assert refused == [1, 2, 3, 4, 8, 16]


def test_an_error_of_the_second_run_alone_is_named_and_other_errors_pass():
    class Failing(Block):
        error: Exception | None = None

        def forward(self, x):
            if Failing.error is not None:
                raise Failing.error
            return super().forward(x)

    def backward(error):
        Failing.error = None
        with Recomputing([block := Failing()]):
            y = block(torch.randn(4, WIDTH, requires_grad=True))
            Failing.error = error
            y.sum().backward()

    with pytest.raises(RecomputationError, match=r"Failing failed .*TypeError: None has no scale"):
        backward(TypeError("None has no scale"))
    with pytest.raises(MemoryError):
        backward(MemoryError())


def test_torchs_error_about_other_saved_tensors_is_named():
    class Longer(Block):
        wrong = False

        def forward(self, x):
            return super().forward(x) if Longer.wrong else super().forward(super().forward(x))

    block = Longer()
    with Recomputing([block]):
        for _ in range(5):  # the fifth call is not compared
            y = block(torch.randn(4, WIDTH, requires_grad=True))
        Longer.wrong = True
        with pytest.raises(RecomputationError, match="Longer computed other values"), named_errors():
            y.sum().backward()


def test_the_error_of_a_checkpoint_of_the_users_passes():
    wrong = []

    def function(x):
        return x.sin() if wrong else x.sin().sin()

    y = checkpoint(function, torch.ones(3, requires_grad=True), use_reentrant=False)
    wrong.append(True)
    with pytest.raises(CheckpointError), named_errors():
        y.sum().backward()


def test_an_argument_that_only_a_later_call_writes_is_refused_at_once():
    class Late(Block):
        def forward(self, x, writes=False):
            return self.inner(x.mul_(2) if writes else x)

    block, x = Late(), torch.randn(4, WIDTH)
    with Recomputing([block]):
        block(x * 1)
        with pytest.raises(RecomputationError, match="Late writes its argument 0 in place"):
            block(x * 1, writes=True)


def test_recompute_compares_a_function_too():
    scale = [1.0]

    def function(x):
        return (x * scale[0]).sin()

    y = recompute(function, torch.ones(3, requires_grad=True))
    scale[0] = 2.0
    with pytest.raises(RecomputationError, match=r"function computed other values .*its output has other values"):
        y.sum().backward()


@pytest.mark.parametrize("keep_attention", [False, True])
def test_compared_runs_work_under_bfloat16_autocast(keep_attention):
    block, x = Block(), torch.randn(4, WIDTH, requires_grad=True)
    with Recomputing([block], keep_attention=keep_attention):
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                y = block(x)
            y.sum().backward()

    assert x.grad is not None


@pytest.mark.parametrize(("captures", "mode", "compares"), [(False, 0, True), (False, 2, False), (True, 0, False)])
def test_runs_are_not_compared_where_the_host_must_not_wait(captures, mode, compares, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode)

    assert BothRuns(torch.sin, [torch.ones(2)], block=torch.sin, calls=Calls()).is_compared is compares
