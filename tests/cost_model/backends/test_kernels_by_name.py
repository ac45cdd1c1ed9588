import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified.cost_model.backends import mimic
from lightning_unified.cost_model.backends.recurrent import cuda_recurrences

ROWS, STEPS, WIDTH, HIDDEN = 3, 5, 8, 16


class BytesMade(torch.utils._python_dispatch.TorchDispatchMode):
    """The sizes of buffers of bytes."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if str(func) == "aten.new_empty.default" and result.dtype is torch.uint8:
            self.counts.append(result.numel())
        return result


@pytest.fixture
def bytes_made():
    return BytesMade()


@pytest.mark.parametrize(("backend", "entry"), [("cpu", 4), ("cuda", 1), ("rocm", 1), ("mps", 4)])
def test_dropout_keeps_a_mask_of_booleans_on_cuda_and_noise_elsewhere(fake, kept, backend, entry):
    source = torch.empty(8, 16, requires_grad=True)
    with mimic(backend):
        assert kept(lambda: F.dropout(source, 0.1), source) == 8 * 16 * entry


def test_dropout_that_is_off_keeps_nothing(fake, kept):
    source = torch.empty(8, 16, requires_grad=True)
    with mimic("cuda"):
        assert kept(lambda: F.dropout(source, 0.1, training=False), source) == 0


@pytest.mark.parametrize("backend", ["cuda", "mps"])
def test_rms_norm_keeps_one_float_a_row(fake, kept, backend):
    source, weight = torch.empty(8, 16, requires_grad=True), torch.empty(16, requires_grad=True)
    with mimic(backend):
        assert kept(lambda: F.rms_norm(source, (16,), weight), source, weight) == 8 * 4


def test_rms_norm_gives_gradients_of_input_and_weight(fake):
    norm, source = nn.RMSNorm(16), torch.empty(8, 16, requires_grad=True)
    with mimic("cuda"):
        norm(source).sum().backward()
    assert source.grad.shape == (8, 16)
    assert norm.weight.grad.shape == (16,)


@pytest.mark.parametrize(("kind", "a_layer", "between"), [(nn.LSTM, 6, 1), (nn.GRU, 7, 1), (nn.RNN, 2, 1)])
@pytest.mark.parametrize("directions", [1, 2])
def test_a_recurrence_keeps_its_reserve_on_cuda(fake, kept, kind, a_layer, between, directions):
    layers = 2
    module = kind(WIDTH, HIDDEN, layers, batch_first=True, bidirectional=directions == 2)
    source = torch.empty(ROWS, STEPS, WIDTH, requires_grad=True)
    with mimic("cuda"):
        count = kept(lambda: module(source)[0], source, *module.parameters())
    positions = ROWS * STEPS * HIDDEN * directions * 4
    states = layers * directions * ROWS * HIDDEN * 4 * (2 if kind is nn.LSTM else 1)
    assert count - states in {
        positions * (a_layer * layers - between) + positions,
        positions * (a_layer * layers - between) + positions - states // 2,
    }


@pytest.mark.parametrize(("name", "published"), [("lstm", 736_000_000), ("gru", 864_000_000)])
def test_the_reserve_is_what_cudnn_printed(fake, bytes_made, name, published):
    gates, layers, hidden, width, rows, steps = {"lstm": 4, "gru": 3}[name], 4, 320, 123, 50, 500
    weights = []
    for layer in range(layers):
        shapes = (
            (gates * hidden, width if layer == 0 else hidden),
            (gates * hidden, hidden),
            (gates * hidden,),
            (gates * hidden,),
        )
        weights += [torch.empty(shape) for shape in shapes]
    state = torch.empty(layers, rows, hidden)
    state = (state, state) if name == "lstm" else state
    with bytes_made:
        cuda_recurrences()[name](
            None, torch.empty(steps, rows, width), state, weights, True, layers, 0.0, True, False, False
        )
    assert published in bytes_made.counts


@pytest.mark.parametrize(
    ("positions", "units", "layers", "dropout", "recorded"),
    [(6400, 512, 2, 0.0, 114_819_840), (8192, 1024, 3, 0.1, 368_575_232)],
)
def test_the_workspace_is_near_what_a_gpu_took(fake, bytes_made, positions, units, layers, dropout, recorded):
    module = nn.LSTM(units, units, layers, dropout=dropout)
    with mimic("cuda"), bytes_made:
        module(torch.empty(positions // 64, 64, units))
    assert any(count == pytest.approx(recorded, rel=0.001) for count in bytes_made.counts)


def test_dropout_between_layers_keeps_a_bit_an_entry(fake, kept):
    source = torch.empty(STEPS, 4, WIDTH, requires_grad=True)
    counts = []
    for dropout in (0.0, 0.1):
        module = nn.LSTM(WIDTH, HIDDEN, 3, dropout=dropout)
        with mimic("cuda"):
            counts.append(kept(lambda module=module: module(source)[0], source, *module.parameters()))
    assert counts[1] - counts[0] == 2 * STEPS * 4 * HIDDEN // 8


def test_what_a_recurrence_writes_lies_position_by_position(fake):
    with mimic("cuda"):
        output = nn.LSTM(WIDTH, HIDDEN, batch_first=True)(torch.empty(ROWS, STEPS, WIDTH))[0]
    assert output.shape == (ROWS, STEPS, HIDDEN)
    assert output.transpose(0, 1).is_contiguous()


def test_the_gradients_of_a_recurrences_weights_are_one_block(fake):
    module = nn.LSTM(WIDTH, HIDDEN, 2)
    with mimic("cuda"):
        module(torch.empty(STEPS, ROWS, WIDTH))[0].sum().backward()
    blocks = {parameter.grad.untyped_storage()._cdata: parameter.grad for parameter in module.parameters()}
    assert len(blocks) == 1
    count = next(iter(blocks.values())).untyped_storage().nbytes()
    assert count == 4 * sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("options", [{"proj_size": 4}, {"bias": False}, {"bidirectional": True, "dropout": 0.1}])
@pytest.mark.parametrize("backend", ["cuda", "mps"])
def test_a_recurrence_of_any_kind_is_differentiable(fake, backend, options):
    module = nn.LSTM(WIDTH, HIDDEN, 2, **options)
    with mimic(backend):
        output, (hidden, cell) = module(torch.empty(STEPS, ROWS, WIDTH))
        output.sum().backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in module.parameters())
    assert output.shape[-1] == options.get("proj_size", HIDDEN) * (2 if "bidirectional" in options else 1)
    assert cell.shape == (2 * (2 if "bidirectional" in options else 1), ROWS, HIDDEN)
    assert hidden.shape[-1] == options.get("proj_size", HIDDEN)


def test_rows_of_unequal_length_run_packed(fake):
    module = nn.GRU(WIDTH, HIDDEN)
    data, sizes = torch.empty(6, WIDTH, requires_grad=True), torch.tensor([3, 2, 1])
    with mimic("cuda"):
        output, _ = torch.gru(data, sizes, torch.empty(1, 3, HIDDEN), module._flat_weights, True, 1, 0.0, True, False)
        output.sum().backward()
    assert output.shape == (6, HIDDEN)


def test_autocast_lowers_a_recurrence_as_a_whole(fake):
    module = nn.LSTM(WIDTH, HIDDEN)
    with mimic("cuda"), torch.autocast("cuda", torch.bfloat16):
        assert module(torch.empty(STEPS, ROWS, WIDTH))[0].dtype is torch.float16  # cuDNN's, whatever autocast's


@pytest.mark.parametrize(("backend", "together"), [("cpu", False), ("cuda", True), ("rocm", True), ("mps", False)])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_updates_all_parameters_at_once_on_cuda_only(fake, operations, backend, together, kind):
    module = nn.Linear(4, 4)
    with mimic(backend):
        optimizer = kind(module.parameters(), lr=0.1)
        module(torch.empty(2, 4)).sum().backward()
        with operations() as ran:
            optimizer.step()
    assert any(name.startswith("_foreach_") for name in ran.names) is together


def test_an_optimizer_with_a_given_kernel_keeps_it(fake, operations):
    module = nn.Linear(4, 4)
    with mimic("cuda"):
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        module(torch.empty(2, 4)).sum().backward()
        with operations() as ran:
            optimizer.step()
    assert "_fused_adamw_" in ran.names
