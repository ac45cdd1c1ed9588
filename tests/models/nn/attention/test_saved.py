"""Attention outputs are saved between the two runs of a block.

Every bit is as without, and the kernel runs once.
"""

import copy
import gc
import logging
import random
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_unified.errors import RecomputationError
from lightning_unified.nn.attention import saved
from lightning_unified.nn.recomputing import RecomputePolicy, Recomputing


@torch.library.custom_op("lightning_unified_tests::noisy_attention", mutates_args=())
def noisy_attention(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """Stands for a kernel that draws noise, which no kernel of a CPU does."""
    mask = (torch.rand_like(query) > dropout_p).to(query.dtype)
    return (query + key + value) * mask, mask


@noisy_attention.register_fake
def _(query, key, value, dropout_p):
    return torch.empty_like(query), torch.empty_like(query)


def _save(ctx, inputs, output):
    ctx.save_for_backward(output[1])


def _backward(ctx, gradient, _):
    (mask,) = ctx.saved_tensors
    return gradient * mask, gradient * mask, gradient * mask, None


noisy_attention.register_autograd(_backward, setup_context=_save)
NOISY = torch.ops.lightning_unified_tests.noisy_attention.default


@pytest.fixture
def _noisy_is_a_kernel(monkeypatch):
    kernels = saved.attention_kernels() | {NOISY}
    monkeypatch.setattr(saved, "attention_kernels", lambda: kernels)


class Block(nn.Module):
    """Attention between layers with dropout.

    It writes a buffer and draws from Python's generator too.
    """

    def __init__(self, attention="kernel"):
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.BatchNorm1d(5)
        self.before, self.after = nn.Dropout(0.3), nn.Dropout(0.3)
        self.attention = attention

    def forward(self, x):
        query, key, value = self.inner(self.before(self.norm(x))).unflatten(-1, (3, 1, 8)).permute(2, 0, 3, 1, 4)
        if self.attention == "noisy":
            y = noisy_attention(query, key, value, 0.5)[0]
        else:
            y = scaled_dot_product_attention(
                query, key, value, is_causal=True, dropout_p=0.2 if self.attention == "math" else 0.0
            )
        return x + self.after(self.outer(y.squeeze(1))) * random.random()


class Runs(TorchDispatchMode):
    """Counts how often kernels of attention run."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in {NOISY, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}
        return func(*args, **(kwargs or {}))


def net(attention="kernel"):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(attention) for _ in range(2)))


def outcome(net, *, autocast=False, passes=1):
    """Return all that a step leaves, and how often kernels of attention ran in it."""
    torch.manual_seed(1)
    random.seed(1)
    x = torch.randn(3, 5, 8, requires_grad=True)
    with Runs() as runs:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = net(x).square().mean()
        for left in range(passes, 0, -1):
            loss.backward(retain_graph=left > 1)
    gradients = [x.grad, *(parameter.grad for parameter in net.parameters())]
    return [loss.detach(), *gradients, *net.state_dict().values(), torch.get_rng_state()], runs.count


def assert_equal(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16 autocast"])
def test_a_step_is_equal_bit_for_bit_and_the_kernel_runs_once_a_block(autocast):
    plain, _ = outcome(net(), autocast=autocast)
    recomputed = net()
    with Recomputing(recomputed):
        _, twice = outcome(recomputed, autocast=autocast)
    kept = net()
    with Recomputing(kept, keep_attention=True):
        again, once = outcome(kept, autocast=autocast)

    assert_equal(plain, again)
    assert (twice, once) == (4, 2)


@pytest.mark.usefixtures("_noisy_is_a_kernel")
def test_noise_behind_a_kernel_that_draws_some_is_the_same_though_it_runs_once():
    plain, _ = outcome(net("noisy"))
    kept = net("noisy")
    with Recomputing(kept, keep_attention=True):
        again, once = outcome(kept)

    assert once == 2
    assert_equal(plain, again)


def test_a_graph_that_is_kept_may_run_backward_again():
    plain, _ = outcome(net(), passes=2)
    kept = net()
    with Recomputing(kept, keep_attention=True):
        again, _ = outcome(kept, passes=2)

    assert_equal(plain, again)


def test_without_a_kernel_all_is_recomputed_and_that_is_said_once(caplog):
    plain, _ = outcome(net("math"))
    kept = net("math")
    with Recomputing(kept, keep_attention=True), caplog.at_level(logging.WARNING, "lightning_unified"):
        again, _ = outcome(kept)

    assert_equal(plain, again)
    assert [record.message for record in caplog.records] == [
        "Block runs no attention kernel whose output could be kept (flash, memory-efficient, cuDNN): all of it is recomputed."
    ]


def test_an_output_that_no_gradient_needs_may_be_written_over():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = scaled_dot_product_attention(x, x, x)
            y *= 2
            return self.linear(y)

    torch.manual_seed(0)
    block, x = Frozen(), torch.randn(3, 1, 5, 8)
    twin = copy.deepcopy(block)
    twin(x).sum().backward()
    with Recomputing([block], keep_attention=True):
        block(x).sum().backward()

    assert torch.equal(block.linear.weight.grad, twin.linear.weight.grad)


def test_a_block_that_attends_more_often_in_its_second_run_is_refused():
    class Fickle(Block):
        runs = 0

        def forward(self, x):
            Fickle.runs += 1
            if Fickle.runs == 2:
                x = scaled_dot_product_attention(x[None], x[None], x[None])[0]
            return super().forward(x)

    block = Fickle("math")
    with Recomputing([block], keep_attention=True):
        y = block(torch.randn(3, 5, 8, requires_grad=True))
        with pytest.raises(RecomputationError, match=r"Fickle failed .* where its first run did not"):
            y.sum().backward()


def test_nothing_of_it_lives_on_after_the_backward_pass(monkeypatch):
    made = []
    monkeypatch.setattr(
        saved.SavedAttention,
        "__init__",
        lambda self: made.append(weakref.ref(self)) or setattr(self, "_outputs", []),
    )
    kept = net()
    gc.disable()
    try:
        with Recomputing(kept, keep_attention=True):
            kept(torch.randn(3, 5, 8)).sum().backward()
        assert len(made) == 2 and not any(one() for one in made)
    finally:
        gc.enable()


def test_a_fake_step_sees_the_kernel_once():
    with FakeTensorMode(allow_non_fake_inputs=True), Runs() as runs:
        module = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        with Recomputing([module], keep_attention=True):
            module(torch.randn(3, 5, 8)).sum().backward()

    assert runs.count == 1


@pytest.mark.slow
def test_a_compiled_block_keeps_its_gradients():
    def block():
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def gradients(module):
        torch.manual_seed(1)
        module(torch.randn(3, 5, 8)).square().sum().backward()
        return [parameter.grad for parameter in module.parameters()]

    plain = gradients(block())
    torch.compiler.reset()
    compiled = block()
    with Recomputing([compiled], keep_attention=True):
        compiled.compile(backend="aot_eager")
        again = gradients(compiled)

    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(plain, again, strict=True))


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (RecomputePolicy(blocks=0), "none"),
        (RecomputePolicy(blocks=1), "1 block"),
        (RecomputePolicy(blocks=6, of=12), "6 of 12 blocks"),
        (RecomputePolicy(blocks="all", of=12), "all blocks"),
        (RecomputePolicy(blocks="all", keep_attention=True), "all blocks, attention kept"),
    ],
    ids=str,
)
def test_a_policy_says_what_it_is(policy, text):
    assert str(policy) == text


def test_a_policy_chooses_from_the_input_on():
    blocks = list(net())

    assert RecomputePolicy(blocks=1).choose(blocks) == blocks[:1]
    assert RecomputePolicy(blocks="all").choose(blocks) == blocks


@pytest.mark.parametrize("blocks", [-1, True, "some", 0.5])
def test_a_policy_of_no_count_is_refused(blocks):
    with pytest.raises(ValueError, match=r'give how many blocks are recomputed, 0 or more, or "all"'):
        RecomputePolicy(blocks=blocks)
