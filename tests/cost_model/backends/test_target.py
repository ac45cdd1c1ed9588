import pytest
import torch
import torch.optim.optimizer as optimizers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_unified.cost_model.backends import mimic
from tests.support.lanes import first_cells, slow


class Block(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.first, self.second, self.drop = nn.LayerNorm(width), nn.RMSNorm(width), nn.Dropout(0.1)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(rows, length, width)))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.group = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return F.adaptive_avg_pool2d(x + self.group(self.second(x)), 1).flatten(1)


CASES = {
    "block": (Block, (2, 16, 32)),
    "residual": (Residual, (2, 3, 8, 8)),
    "lstm": (lambda: nn.LSTM(8, 16, 2, batch_first=True), (2, 5, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (2, 8, 32)),
}


def step(module, shape, *, dtype):
    optimizer = torch.optim.AdamW(module.parameters())
    source = torch.empty(shape)
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        output = module(source)
        loss = (output[0] if isinstance(output, tuple) else output).float().square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    return all(parameter.grad.shape == parameter.shape for parameter in module.parameters())


DEVICES = (("cuda", torch.float32), ("rocm", torch.float16), ("mps", torch.bfloat16))


@first_cells(
    1,
    ("case", "backend", "dtype"),
    [
        (case, *device) if place % len(DEVICES) == turn else slow(case, *device)
        for place, case in enumerate(CASES)
        for turn, device in enumerate(DEVICES)
    ],
)
def test_a_step_runs_to_its_end(fake, case, backend, dtype):
    build, shape = CASES[case]
    with mimic(backend):
        assert step(build(), shape, dtype=dtype)


@pytest.mark.parametrize("weights", [True, False])
def test_multi_head_attention_runs_to_its_end(fake, operations, weights):
    module, source = nn.MultiheadAttention(32, 4, batch_first=True, dropout=0.1), torch.empty(2, 8, 32)
    with operations() as ran, mimic("cuda"):
        module(source, source, source, need_weights=weights)[0].sum().backward()
    assert ("_scaled_dot_product_efficient_attention" in ran.names) is not weights


def test_a_bias_is_added_in_place_where_the_product_is_another_kernel(fake, operations):
    layer, rows = nn.Linear(8, 4), torch.empty(5, 2, 8, requires_grad=True)
    with operations() as ran, mimic("cuda"):
        layer(rows)
        assert "addmm" in ran.names
        layer(rows.transpose(0, 1)).sum().backward()
    assert ran.names.count("add_") == 1
    assert "add" not in ran.names
    assert layer.bias.grad.shape == (4,)


@first_cells(1, "reentrant", [True, False])
def test_recomputation_in_the_backward_pass_runs_as_the_target_too(fake, operations, reentrant):
    block, source = Block(), torch.empty(2, 16, 32, requires_grad=True)
    with operations() as ran, mimic("cuda"), torch.autocast("cpu", torch.bfloat16):
        checkpoint(block, source, use_reentrant=reentrant).sum().backward()
    assert ran.names.count("_scaled_dot_product_cudnn_attention") == 2
    assert ran.names.count("native_dropout") == 2
    assert "bernoulli_" not in ran.names


def test_nothing_is_left_changed_after_a_failure():
    watched = [
        (torch, "is_autocast_enabled"),
        (torch, "get_autocast_dtype"),
        (torch.autocast, "__init__"),
        (torch.amp.GradScaler, "__init__"),
        (F, "has_torch_function_unary"),
        (torch.functional, "has_torch_function"),
        (optimizers, "_foreach_supported_types"),
        (optimizers, "_get_foreach_kernels_supported_devices"),
        (torch.utils._foreach_utils, "_get_foreach_kernels_supported_devices"),
    ]
    before = [getattr(owner, name) for owner, name in watched]
    with pytest.raises(RuntimeError, match="mat1 and mat2"), mimic("cuda"):
        torch.empty(2, 3) @ torch.empty(2, 3)
    assert [getattr(owner, name) for owner, name in watched] == before
    assert torch._C._len_torch_function_stack() == 0


def test_a_tensor_class_of_the_users_own_still_takes_over():
    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "mine"

    with mimic("cuda"):
        assert F.softmax(torch.empty(2, 2).as_subclass(Named), -1) == "mine"


def test_an_unknown_backend_is_refused_by_name():
    with (
        pytest.raises(ValueError, match=r"backend='tpu' is not known; use one of cpu, cuda, rocm, mps"),
        mimic("tpu"),
    ):
        pass
