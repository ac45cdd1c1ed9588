import warnings

import pytest
import torch
from torch.nn import functional as F

from lightning_unified.cost_model.backends import mimic
from lightning_unified.cost_model.backends.autocast import casts_of

# Lowered on CUDA, and built of operations that CPU autocast lowers itself, or not to be reached from Python.
BUILT_OF_LOWERED = {
    "_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention", "_cudnn_rnn", "miopen_rnn", "norm", "binary_cross_entropy",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
}  # fmt: skip


def cast(backend, operation, *, dtype=torch.bfloat16):
    with mimic(backend), torch.autocast("cpu", dtype):
        return operation(torch.empty(4, 8, dtype=dtype, requires_grad=True)).dtype


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: F.layer_norm(x, (8,)),
        lambda x: x.softmax(-1),
        lambda x: F.softmax(x, -1),
        lambda x: torch.log_softmax(x, -1),
        lambda x: x**2,
        lambda x: x.exp(),
        lambda x: x.sum(),
        lambda x: x.cumsum(0),
        lambda x: torch.logsumexp(x, 0),
        lambda x: F.group_norm(x, 2),
        lambda x: F.softplus(x),
        lambda x: torch.linalg.vector_norm(x),
    ],
    ids=[
        "layer_norm",
        "softmax",
        "F.softmax",
        "log_softmax",
        "power",
        "exp",
        "sum",
        "cumsum",
        "logsumexp",
        "group_norm",
        "softplus",
        "vector_norm",
    ],
)
def test_cuda_raises_to_float32_what_the_cpu_leaves(fake, operation):
    with torch.autocast("cpu", torch.bfloat16):
        assert operation(torch.empty(4, 8, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert cast("cuda", operation) is torch.float32
    assert cast("mps", operation) is torch.float32


@pytest.mark.parametrize("operation", [F.gelu, F.relu, lambda x: x + x, lambda x: x.mean(), F.silu])
def test_what_no_list_names_keeps_half_precision(fake, operation):
    assert cast("cuda", operation) is torch.bfloat16


def test_a_vector_product_is_lowered(fake):
    with mimic("cuda"), torch.autocast("cpu", torch.bfloat16):
        assert torch.mv(torch.empty(3, 4), torch.empty(4)).dtype is torch.bfloat16


def test_padding_stays_in_half_precision_on_cuda(fake):
    assert cast("cpu", lambda x: F.pad(x[None], (1, 1), mode="reflect")) is torch.float32
    assert cast("cuda", lambda x: F.pad(x[None], (1, 1), mode="reflect")) is torch.bfloat16


def test_batch_norm_is_raised_on_mps_only(fake):
    operation = lambda x: F.batch_norm(x, None, None, training=True)  # noqa: E731
    assert cast("mps", operation) is torch.float32
    assert cast("cuda", operation) is torch.bfloat16


def test_scattered_values_are_promoted(fake):
    with mimic("cuda"), torch.autocast("cpu", torch.bfloat16):
        index = torch.empty(4, dtype=torch.long)
        assert torch.scatter_add(torch.empty(4), 0, index, torch.empty(4, dtype=torch.bfloat16)).dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_log_probabilities_are_of_half_precision_and_only_their_loss_is_raised(fake, operations, dtype):
    with operations() as ran, mimic("cuda"), torch.autocast("cpu", dtype):
        logits = torch.empty(4, 8, dtype=dtype, requires_grad=True)
        loss = F.cross_entropy(logits, torch.empty(4, dtype=torch.long))
        assert loss.dtype is torch.float32
        assert ran.names.index("_log_softmax") < ran.names.index("_to_copy") < ran.names.index("nll_loss_forward")
        loss.backward()
        assert logits.grad.dtype is dtype


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("kind", ["rows", "positions", "one", "probabilities"])
def test_the_loss_of_any_kind_is_the_loss(smoothing, weighted, reduction, kind):
    shape = {"positions": (4, 8, 3), "one": (8,)}.get(kind, (4, 8))
    generator = torch.Generator().manual_seed(0)
    logits, weight = torch.randn(shape, generator=generator), torch.rand(8, generator=generator) if weighted else None
    target = torch.randint(8, (4, 3) if kind == "positions" else shape[:-1], generator=generator)
    if kind == "probabilities":
        target = torch.rand(shape, generator=generator)
    elif kind != "one":
        target[0] = -100
    options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
    with mimic("cuda"), torch.autocast("cpu", torch.bfloat16):
        found = F.cross_entropy(logits.bfloat16(), target, **options)
    torch.testing.assert_close(found.float(), F.cross_entropy(logits, target, **options), rtol=0.03, atol=0.06)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("probable", [False, True])
def test_a_loss_keeps_log_probabilities_in_half_precision_and_what_is_made_of_them(fake, kept, smoothing, probable):
    logits = torch.empty(64, 128, dtype=torch.bfloat16, requires_grad=True)
    target = torch.empty(64, 128) if probable else torch.empty(64, dtype=torch.long)
    with mimic("cuda"), torch.autocast("cpu", torch.bfloat16):
        count = kept(lambda: F.cross_entropy(logits, target, label_smoothing=smoothing), logits, target)
    halves, floats = 64 * 128 * 2, 64 * 128 * 4
    smoothed_targets = floats * bool(smoothing)
    assert count - halves - (smoothed_targets if probable else floats) in range(64 * 16)


def test_autocast_for_the_backend_acts_on_the_fake_cpu_without_a_warning(fake):
    with warnings.catch_warnings(), mimic("cuda"):
        warnings.simplefilter("error")
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled("cuda")
            assert torch.is_autocast_enabled()
            assert torch.get_autocast_dtype("cuda") is torch.float16
            assert (torch.empty(2, 2) @ torch.empty(2, 2)).dtype is torch.float16


def test_a_scaler_for_the_backend_scales_on_the_fake_cpu(fake):
    with mimic("cuda"):
        assert torch.amp.GradScaler("cuda").is_enabled()
        assert torch.amp.GradScaler().scale(torch.empty(())).device.type == "cpu"


def test_a_lowered_weight_is_kept_once_a_context(fake, operations):
    weight = torch.empty(8, 8, requires_grad=True)
    with operations() as ran, mimic("cuda"), torch.autocast("cuda", torch.bfloat16):
        F.linear(F.linear(torch.empty(2, 8, dtype=torch.bfloat16), weight), weight)
    assert ran.names.count("_to_copy") == 1


@pytest.mark.parametrize(("backend", "key"), [("cuda", "AutocastCUDA"), ("mps", "AutocastMPS")])
def test_every_operation_that_the_target_casts_and_the_cpu_does_not_is_known(backend, key):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    target = {name[6:].partition(".")[0] for name in names if has(name, key)}
    cpu = {name[6:].partition(".")[0] for name in names if has(name, "AutocastCPU")}
    known = set(casts_of(backend)) | cpu | BUILT_OF_LOWERED | {"_mps_convolution"}
    assert sorted(target - known) == []
