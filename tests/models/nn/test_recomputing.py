"""Blocks that recompute, and nothing else about their module that differs."""

import copy
import functools
import io
import pickle
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_unified.nn.recomputing import Recomputing


class Block(nn.Module):
    """Writes buffers, draws from torch's and Python's generators."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.4)

    def forward(self, x, scale=1.0, cache=None):
        return x + scale * self.drop(self.norm(self.linear(x)).relu()) * random.random()


class Net(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x, **kwargs):
        for layer in self.layers:
            x = layer(x, **kwargs)
        return x


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def counted(block):
    """Return a list that grows by one whenever the block's inside runs."""
    calls = []
    far = SimpleNamespace(by=SimpleNamespace(calls=calls))  # state nearer to the hook is written by first runs only
    block.linear.register_forward_pre_hook(lambda *_: far.by.calls.append(1))
    return calls


def outcome(net, *, autocast=False, micro_batches=1, **kwargs):
    """Train one step of `micro_batches`; return everything that recomputation must leave equal."""
    torch.manual_seed(1)
    random.seed(1)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    losses = []
    for x in torch.randn(8, 6).chunk(micro_batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(net(x, **kwargs).square().mean() / micro_batches)
        losses[-1].backward()
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    optimizer.step()
    return [*losses, *gradients, *net.state_dict().values(), torch.get_rng_state()], random.getstate()


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16 autocast"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_losses_gradients_statistics_weights_and_generators_are_equal_bit_for_bit(net, autocast, micro_batches):
    plain, plain_random = outcome(copy.deepcopy(net), autocast=autocast, micro_batches=micro_batches)
    calls = counted(net.layers[0])
    with Recomputing(net.layers):
        again, again_random = outcome(net, autocast=autocast, micro_batches=micro_batches)

    assert len(calls) == 2 * micro_batches
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    assert plain_random == again_random


def test_keyword_arguments_reach_the_block_and_have_gradients(net):
    def run(net):
        scale = torch.full((), 2.0, requires_grad=True)
        return [*outcome(net, scale=scale)[0], scale.grad]

    plain = run(copy.deepcopy(net))
    with Recomputing(net.layers):
        again = run(net)

    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def test_torch_sees_the_devices_of_keyword_arguments(net, monkeypatch):
    seen = []
    monkeypatch.setattr(
        torch.utils.checkpoint,
        "_infer_device_type",
        lambda *args: seen.extend(arg for arg in args if isinstance(arg, torch.Tensor)) or "cuda",
    )
    x = torch.randn(4, 6)
    with Recomputing(net.layers[:1]):
        net.layers[0](x=x).sum().backward()
        assert [value.device for value in seen] == [x.device]  # of a stand-in: the first call finds out what it writes
        net.layers[0](x=x).sum().backward()

    assert seen[-1] is x


def test_a_buffer_that_two_modules_share_stays_one_in_the_second_run():
    class Writer(nn.Module):
        def __init__(self, total):
            super().__init__()
            self.register_buffer("total", total)

        def forward(self, x):
            self.total += 1
            return x

    class Reader(Writer):
        def forward(self, x):
            return x * x * self.total.item()

    class Pair(nn.Sequential):
        def __init__(self):
            total = torch.zeros(())
            super().__init__(nn.Linear(6, 6), Writer(total), Reader(total))

    pair = Pair()
    x = torch.randn(4, 6)
    reference = copy.deepcopy(pair)
    reference(x).sum().backward()
    with Recomputing([pair]):
        pair(x).sum().backward()

    assert torch.equal(pair[0].weight.grad, reference[0].weight.grad)
    assert pair[1].total is pair[2].total and pair[1].total == 1


@pytest.mark.parametrize("how", ["eval mode", "no gradients"])
def test_a_block_runs_once_where_nothing_is_trained(net, how):
    calls = counted(net.layers[0])
    net.train(how != "eval mode")
    with Recomputing(net.layers), torch.set_grad_enabled(how != "no gradients"):
        y = net(torch.randn(4, 6, requires_grad=True))
        if y.requires_grad:
            y.sum().backward()

    assert len(calls) == 1


def test_removing_it_leaves_the_modules_dictionaries_as_they_were(net):
    before = [dict(vars(module)) for module in net.modules()]
    handle = Recomputing(net.layers)
    net(torch.randn(4, 6)).sum().backward()
    handle.remove()
    handle.remove()

    assert all(list(vars(module)) == list(old) for module, old in zip(net.modules(), before, strict=True))
    assert all("forward" not in vars(module) for module in net.modules())


def test_class_names_keys_and_parameters_are_as_before(net):
    before = list(net.state_dict()), [name for name, _ in net.named_parameters()], [type(one) for one in net.modules()]
    with Recomputing(net.layers):
        assert (
            list(net.state_dict()),
            [name for name, _ in net.named_parameters()],
            [type(one) for one in net.modules()],
        ) == before
        net.load_state_dict(net.state_dict())
        assert isinstance(net.layers[0], Block)
        assert repr(net.layers[0]) == repr(Block())


def test_hooks_of_a_block_run_once(net):
    seen = []
    net.layers[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    net.layers[0].register_forward_hook(lambda *_: seen.append("after"))
    net.layers[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    with Recomputing(net.layers):
        net(torch.randn(4, 6, requires_grad=True)).sum().backward()

    assert seen == ["before", "after", "backward"]


def _saved_and_loaded(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), _saved_and_loaded],
    ids=["deepcopy", "pickle", "save"],
)
def test_a_copy_is_independent_and_does_not_recompute(net, copied):
    with Recomputing(net.layers):
        twin = copied(net)
        calls = counted(twin.layers[0])
        assert calls is not None
        twin.layers[0].linear.weight.data.zero_()
        y = twin(torch.randn(4, 6))
        y.sum().backward()

    assert len(calls) == 1
    assert net.layers[0].linear.weight.abs().sum() > 0
    assert net.layers[0].linear.weight.grad is None
    assert type(twin.layers[0]) is Block and twin.layers[0].linear.weight.grad is not None


def test_a_copy_of_a_copy_is_independent_too(net):
    with Recomputing(net.layers):
        twin = copy.deepcopy(copy.deepcopy(net))
    twin(torch.randn(4, 6)).sum().backward()

    assert net.layers[0].linear.weight.grad is None


def test_a_forward_that_somebody_replaced_is_recomputed_saved_and_given_back(net):
    block = net.layers[0]
    theirs = functools.partial(Block.forward, block, scale=3.0)
    block.forward = theirs
    handle = Recomputing([block])
    twin = pickle.loads(pickle.dumps(net)).layers[0]
    assert twin.forward.keywords == {"scale": 3.0} and twin.forward.args[0] is twin
    calls = counted(block)
    block(torch.randn(4, 6)).sum().backward()
    assert len(calls) == 2
    handle.remove()
    assert block.forward is theirs


def test_what_somebody_puts_on_top_stays_and_recomputation_ends_all_the_same(net):
    block = net.layers[0]
    handle = Recomputing([block])
    ours = block.forward
    block.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    top = block.forward
    handle.remove()
    calls = counted(block)
    block(torch.randn(4, 6)).sum().backward()

    assert block.forward is top
    assert len(calls) == 1


def test_a_block_that_checkpoints_itself_from_now_on_is_left_alone(net):
    calls = counted(net.layers[0])
    with Recomputing(net.layers):
        net.layers[0].gradient_checkpointing = True
        net(torch.randn(4, 6)).sum().backward()

    assert len(calls) == 1


class _Cache:
    """Holds keys and values as `transformers.DynamicCache` does."""

    def __init__(self, length=0):
        self.length = length

    def get_seq_length(self):
        return self.length


class _Caching(Block):
    def forward(self, x, cache=None):
        if cache is not None:
            cache.length += len(x)
        return super().forward(x)


def test_an_empty_cache_is_not_filled_in_training(net):
    block, cache = _Caching(), _Cache()
    calls = counted(block)
    with Recomputing([block]):
        block(torch.randn(4, 6), cache).sum().backward()

    assert (len(calls), cache.length) == (2, 0)


def test_a_filled_cache_keeps_the_block_from_being_recomputed_and_that_is_said_once(net, caplog):
    block, cache = _Caching(), _Cache(3)
    calls = counted(block)
    with Recomputing([block]):
        for _ in range(2):
            block(torch.randn(4, 6), cache=cache).sum().backward()

    assert (len(calls), cache.length) == (2, 11)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "_Caching is called in training with a _Cache that it may fill, which a second run would fill twice"
    ]


def test_only_the_inputs_of_blocks_are_kept(net):
    def kept():
        tensors = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensors.append(tensor) or tensor, lambda one: one):
            net(torch.randn(4, 6, requires_grad=True))
        return len(tensors)

    assert kept() > 3 * 5
    with Recomputing(net.layers):
        assert kept() in (3, 6)  # torch before 2.13 keeps an empty tensor beside each block's input


@pytest.mark.slow
def test_a_compiled_module_recomputes_from_then_on_and_counts_batches_once(net):
    compiled = torch.compile(net, backend="eager")
    calls = counted(net.layers[0])
    compiled(torch.randn(4, 6)).sum().backward()
    with Recomputing(net.layers):
        compiled(torch.randn(4, 6)).sum().backward()
    compiled(torch.randn(4, 6)).sum().backward()

    assert len(calls) == 1 + 2 + 1
    assert net.layers[0].norm.num_batches_tracked == 3
