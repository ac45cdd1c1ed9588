"""Rules R2 and R3 once module and optimizers exist.

Errors of the first step, and silent ones, are refused before it.
"""

import types

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import precision as stock
from torch import nn

from lightning_unified.errors import PrecisionError
from lightning_unified.precision import MixedPrecision, float16_warnings, verify_plugin

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32


def torch_of(version):
    return types.SimpleNamespace(torch=types.SimpleNamespace(__version__=version))


def scaled(device="cpu"):
    return stock.MixedPrecision("16-mixed", device, scaler=torch.amp.GradScaler(device))


def adam(dtype=FULL, *, fused=False):
    return torch.optim.AdamW([nn.Parameter(torch.zeros(2, dtype=dtype))], fused=fused)


def verify(plugin, device="cpu", *optimizers, clips=False, version="2.13.0"):
    verify_plugin(plugin, device_type=device, optimizers=optimizers, clips=clips, sources=torch_of(version))


@pytest.mark.parametrize(
    ("device", "version", "dtype", "fused", "clips", "refusal"),
    [
        # any device: fp32 parameters, unfused, clipped or not
        ("cpu", "2.13.0", FULL, False, True, None),
        ("xpu", "2.11.0", FULL, False, True, None),
        ("mps", "2.11.0", FULL, False, True, None),
        ("mps", "2.12.1", FULL, False, True, None),
        ("mps", "2.13.0", FULL, False, True, None),
        # fused optimizers unscale inside their step
        ("cpu", "2.13.0", FULL, True, False, None),
        ("cpu", "2.13.0", FULL, True, True, "gradient_clip_val with the fused AdamW"),
        ("xpu", "2.13.0", FULL, True, True, "gradient_clip_val with the fused AdamW"),
        ("mps", "2.11.0", FULL, True, False, "before torch 2.13 .issue 186360"),
        ("mps", "2.12.1", FULL, True, False, "before torch 2.13 .issue 186360"),
        ("mps", "2.13.0", FULL, True, False, None),
        ("mps", "2.13.0", FULL, True, True, "gradient_clip_val with the fused AdamW"),
        # float16 parameters: torch unscales their gradients in a fused step only
        ("cpu", "2.13.0", HALF, False, False, "float16 parameters, whose gradients torch does not unscale"),
        ("xpu", "2.13.0", HALF, False, False, "float16 parameters, whose gradients torch does not unscale"),
        ("mps", "2.13.0", HALF, False, False, "float16 parameters, whose gradients torch does not unscale"),
        ("cpu", "2.13.0", HALF, True, False, None),
        ("mps", "2.13.0", HALF, True, False, None),
        # bfloat16 parameters: unscaled everywhere, but to zero on MPS before 2.13
        ("cpu", "2.13.0", BF16, False, True, None),
        ("mps", "2.12.1", BF16, False, False, "sets to zero in unscaling on mps .issue 184286"),
        ("mps", "2.13.0", BF16, False, False, None),
    ],
)
def test_what_a_scaler_can_work_with(device, version, dtype, fused, clips, refusal):
    optimizer = adam(dtype, fused=fused)
    if refusal is None:
        verify(scaled(device), device, optimizer, clips=clips, version=version)
        return
    with pytest.raises(PrecisionError, match=refusal):
        verify(scaled(device), device, optimizer, clips=clips, version=version)


@pytest.mark.parametrize("version", ["2.12.1", "2.13.0"])
@pytest.mark.parametrize("dtype", [HALF, BF16, FULL])
@pytest.mark.parametrize("plugin", [stock.MixedPrecision("bf16-mixed", "mps"), stock.Precision()])
def test_without_a_scaler_any_optimizer_may_be_fused_and_clipped(plugin, dtype, version):
    verify(plugin, "mps", adam(dtype, fused=True), clips=True, version=version)


@pytest.mark.parametrize("dtype", [HALF, BF16, FULL])
@pytest.mark.parametrize("fused", [False, True])
def test_torch_does_with_a_scaler_what_the_table_says(dtype, fused):
    optimizer, scaler = adam(dtype, fused=fused), torch.amp.GradScaler("cpu", init_scale=8.0)
    (parameter,) = optimizer.param_groups[0]["params"]
    scaler.scale((parameter - 1).square().sum()).backward()
    if dtype == HALF and not fused:
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.step(optimizer)
        return
    scaler.step(optimizer)

    assert float(parameter.detach()[0]) == pytest.approx(1e-3, rel=1e-2)


def test_frozen_half_parameters_are_no_matter():
    optimizer = adam()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=HALF), requires_grad=False)]})

    verify(scaled(), "cpu", optimizer)


def test_lbfgs_is_refused_with_a_scaler_and_taken_without():
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.zeros(2))])
    with pytest.raises(PrecisionError, match=r"LBFGS with 16-mixed.* use bf16-mixed, 32-true, or another"):
        verify(scaled(), "cpu", optimizer)
    verify(stock.MixedPrecision("bf16-mixed", "cpu"), "cpu", optimizer)


def test_every_optimizer_of_a_run_is_looked_at():
    with pytest.raises(PrecisionError, match="gradient_clip_val with the fused AdamW"):
        verify(scaled(), "cpu", adam(), adam(fused=True), clips=True)


def test_a_plugin_for_another_device_is_an_error():
    with pytest.raises(PrecisionError, match="built for mps and the module is on cpu"):
        verify(stock.MixedPrecision("bf16-mixed", "mps"))
    verify(stock.MixedPrecision("bf16-mixed", "cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is seen here is the absence of CUDA")
@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled:UserWarning")
def test_autocast_that_torch_disables_is_an_error():
    with pytest.raises(PrecisionError, match=r"torch disables autocast to torch\.bfloat16 here"):
        verify(stock.MixedPrecision("bf16-mixed", "cuda"), "cuda")


def test_fp16_without_a_live_scaler_of_its_device_is_an_error():
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(PrecisionError, match="no live gradient scaler"):
        verify(stock.MixedPrecision("16-mixed", "cpu", scaler=disabled))
    with pytest.raises(PrecisionError, match=r"on cpu has a gradient scaler for mps; .*GradScaler\('cpu'\)"):
        verify(stock.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("mps")))


class Fits(BoringModel):
    """One step with the optimizer that `optimizer` makes of the parameters.

    It records whether the step began.
    """

    def __init__(self, optimizer):
        super().__init__()
        self.make, self.began = optimizer, False

    def on_train_batch_start(self, batch, batch_idx):
        self.began = True

    def configure_optimizers(self):
        return self.make(self.parameters())


def fused_adamw(parameters):
    return torch.optim.AdamW(parameters, 0.1, fused=True)


@pytest.mark.parametrize(
    ("make", "plain", "ours"),
    [
        (fused_adamw, "does not allow for gradient clipping", "gradient_clip_val with the fused AdamW"),
        (torch.optim.LBFGS, "LBFGS optimizer are not compatible", "LBFGS with 16-mixed"),
    ],
)
def test_lightning_refuses_in_the_first_step_and_we_before_it(trainer, make, plain, ours):
    options = {"accelerator": "cpu", "gradient_clip_val": 0.1}
    late, early = Fits(make), Fits(make)
    with pytest.raises(Exception, match=plain):
        trainer("auto", plugins=[scaled()], **options).fit(late)
    with pytest.raises(PrecisionError, match=ours):
        trainer("unified", plugins=[scaled()], **options).fit(early)

    assert (late.began, early.began) == (True, False)


def test_bf16_clips_a_fused_optimizer_which_lightning_alone_refuses(trainer):
    options = {"accelerator": "cpu", "precision": "bf16-mixed", "gradient_clip_val": 0.1}
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        trainer("auto", **options).fit(Fits(fused_adamw))
    made = trainer("unified", **options)
    made.fit(Fits(fused_adamw))

    assert made.global_step == 1


def warned(module, plugin, device="mps", *optimizers):
    return list(
        float16_warnings(module, plugin, device_type=device, optimizers=optimizers or [adam_of(module, fused=False)])
    )


def adam_of(module, *, fused):
    return torch.optim.AdamW(module.parameters(), fused=fused)


class Layers(BoringModel):
    def __init__(self, *layers):
        super().__init__()
        self.net = nn.Sequential(*layers)


def test_on_mps_fp16_names_the_layers_that_autocast_does_not_keep_in_float32():
    module = Layers(nn.RMSNorm(4), nn.RMSNorm(4), nn.RMSNorm(4), nn.BCELoss(), nn.LayerNorm(4), nn.BCEWithLogitsLoss())
    bce, rms = warned(module, MixedPrecision("16-mixed", device_type="mps"))

    assert bce.startswith("net.3: autocast on mps has no rule for BCELoss, which runs in float16")
    assert "use nn.BCEWithLogitsLoss" in bce
    assert rms.startswith("net.0, net.1 and 1 more: autocast on mps has no rule for RMSNorm")


@pytest.mark.parametrize(
    ("plugin", "device"),
    [
        (MixedPrecision("bf16-mixed", device_type="mps"), "mps"),
        (MixedPrecision("16-mixed", device_type="cpu"), "cpu"),
        (stock.Precision(), "mps"),
    ],
)
def test_other_precisions_and_devices_are_not_warned_of_these_layers(plugin, device):
    assert warned(Layers(nn.RMSNorm(4), nn.BCELoss()), plugin, device) == []


@pytest.mark.parametrize("plugin", [stock.HalfPrecision("16-true"), stock.MixedPrecision("bf16-mixed", "cpu")])
def test_float16_parameters_without_a_scaler_are_warned_of(plugin):
    (text,) = warned(BoringModel().half(), plugin, "cpu")

    assert text.startswith("layer.weight, layer.bias: float16 parameters train without a gradient scaler")
    assert warned(BoringModel().bfloat16(), plugin, "cpu") == []


def test_float16_parameters_that_do_not_train_are_not_warned_of():
    module = BoringModel()
    module.frozen = nn.Linear(2, 2).half().requires_grad_(False)

    assert warned(module, stock.Precision(), "cpu") == []


def test_clipping_of_ones_own_under_a_scaler_with_a_fused_optimizer_is_warned_of():
    class Clips(BoringModel):
        def configure_gradient_clipping(self, optimizer, **_):
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    module, plugin = Clips(), MixedPrecision("16-mixed", device_type="cpu")
    (text,) = warned(module, plugin, "cpu", adam_of(module, fused=True))

    assert "Clips.configure_gradient_clipping will see gradients still multiplied" in text
    assert warned(module, plugin, "cpu") == []


def test_a_run_in_16_true_is_warned_and_trains(trainer):
    made = trainer("unified", accelerator="cpu", precision="16-true")
    with pytest.warns(UserWarning, match="float16 parameters train without a gradient scaler"):
        made.fit(BoringModel())

    assert made.global_step == 1


def test_a_module_made_half_by_hand_under_16_mixed_is_refused_before_the_first_step(trainer):
    module = Fits(torch.optim.AdamW).half()
    with pytest.raises(PrecisionError, match=r"AdamW holds float16 parameters.* leave the module in float32"):
        trainer("unified", accelerator="cpu", plugins=[scaled()]).fit(module)

    assert not module.began
