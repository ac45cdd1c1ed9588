"""The precision gate gives what was asked, or says why not: no scaler is disabled in silence, no flag overridden."""

import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import PrecisionError
from lightning_unified.precision import (
    GatedMixedPrecision,
    PrecisionChoice,
    build_plugin,
    choose_precision,
    verify_plugin,
)


def choose(requested, backend="cuda", native=True, torch_version=(2, 13)):
    return choose_precision(requested, backend=backend, native_bf16=native, torch_version=torch_version)


@pytest.mark.parametrize(
    ("backend", "native", "version", "expected"),
    [
        ("cpu", True, (2, 13), "32-true"),
        ("cuda", True, (2, 13), "bf16-mixed"),
        ("cuda", False, (2, 13), "32-true"),
        ("rocm", True, (2, 13), "bf16-mixed"),
        ("mps", True, (2, 13), "bf16-mixed"),
        ("mps", False, (2, 13), "bf16-mixed"),
        ("mps", False, (2, 5), "32-true"),
        ("xpu", True, (2, 13), "bf16-mixed"),
    ],
)
def test_auto_is_bf16_where_it_is_native_or_saves_memory(backend, native, version, expected):
    choice = choose("auto", backend, native, version)

    assert (choice.precision, choice.scaler) == (expected, False)
    assert choice.reason


@pytest.mark.parametrize("backend", ["cuda", "rocm", "xpu", "mps"])
def test_fp16_always_comes_with_a_scaler(backend):
    assert choose("16-mixed", backend).scaler


@pytest.mark.parametrize(
    ("requested", "backend", "version", "text"),
    [
        ("64-true", "mps", (2, 13), "Metal has no float64"),
        ("16-mixed", "cpu", (2, 13), "use bf16-mixed or 32-true"),
        ("16-mixed", "mps", (2, 7), "needs torch 2.8"),
        ("fp8", "cuda", (2, 13), "not known;.* choose one of"),
        ("bf16-mixd", "cuda", (2, 13), "did you mean bf16-mixed"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(requested, backend, version, text):
    with pytest.raises(PrecisionError, match=text):
        choose(requested, backend, torch_version=version)


def test_fp16_on_mps_is_allowed_from_2_8_on():
    assert choose("16-mixed", "mps", torch_version=(2, 8)).scaler


def test_a_scaler_that_torch_disables_is_an_error():
    """On a machine without CUDA torch disables its scaler with one warning: training would go on unscaled."""
    if torch.cuda.is_available():
        pytest.skip("torch enables the scaler where there is a CUDA device")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(PrecisionError, match="disabled gradient scaler"):
            build_plugin(choose("16-mixed"), device_type="cuda")


def test_a_plugin_for_another_device_is_an_error():
    plugin = MixedPrecision("bf16-mixed", device="cuda")
    with pytest.raises(PrecisionError, match="built for cuda and the module is on cpu"):
        verify_plugin(plugin, device_type="cpu", optimizers=[], clips=False)
    verify_plugin(MixedPrecision("bf16-mixed", device="cpu"), device_type="cpu", optimizers=[], clips=False)


def test_clipping_a_fused_optimizer_under_a_scaler_is_refused_before_the_first_step():
    scaler = torch.amp.GradScaler("cpu")
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    parameter = torch.nn.Parameter(torch.zeros(2))
    fused, unfused = torch.optim.AdamW([parameter], fused=True), torch.optim.AdamW([parameter])
    with pytest.raises(PrecisionError, match="gradient_clip_val with the fused AdamW"):
        verify_plugin(plugin, device_type="cpu", optimizers=[fused], clips=True)
    verify_plugin(plugin, device_type="cpu", optimizers=[unfused], clips=True)
    verify_plugin(plugin, device_type="cpu", optimizers=[fused], clips=False)


def test_bf16_clips_a_fused_optimizer_which_lightning_alone_refuses():
    class Fused(BoringModel):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 0.1, fused=True)

    options = {"accelerator": "cpu", "precision": "bf16-mixed", "gradient_clip_val": 0.1}
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        trainer("auto", **options).fit(Fused())
    made = trainer("unified", **options)
    made.fit(Fused())

    assert made.global_step == 1


def test_a_checkpoint_without_scaler_state_starts_the_scaler_anew():
    plugin = GatedMixedPrecision("16-mixed", device_type="cpu")
    with pytest.warns(UserWarning, match="scaler starts anew"):
        plugin.load_state_dict({})
    plugin.load_state_dict(plugin.state_dict())

    assert plugin.scaler is not None and plugin.scaler.get_scale() == 65536


def trainer(strategy, **options) -> L.Trainer:
    return L.Trainer(
        strategy=strategy, logger=False, enable_checkpointing=False, enable_progress_bar=False, max_steps=1, **options
    )


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize(
    ("flag", "expected"), [(None, "32-true"), ("bf16-mixed", "bf16-mixed"), ("32-true", "32-true")]
)
def test_the_four_routes_give_the_trainers_precision(as_object, flag, expected):
    made = trainer(
        UnifiedStrategy() if as_object else "unified", accelerator="cpu", **({"precision": flag} if flag else {})
    )

    assert made.precision_plugin is made.strategy.precision_plugin
    assert made.precision_plugin.precision == expected
    assert isinstance(made.precision_plugin, GatedMixedPrecision if "mixed" in expected else Precision)


def test_the_strategys_own_precision_is_used_if_the_trainer_names_none():
    made = trainer(UnifiedStrategy(precision="bf16-mixed"), accelerator="cpu")
    made.fit(BoringModel())

    assert made.precision == "bf16-mixed"


def test_two_precisions_are_a_conflict_not_an_override():
    with pytest.raises(PrecisionError, match="give one of them"):
        trainer(UnifiedStrategy(precision="bf16-mixed"), accelerator="cpu", precision="64-true")
    with pytest.raises(PrecisionError, match="give one of them"):
        trainer(UnifiedStrategy(precision="auto"), accelerator="cpu", plugins=[Custom()])


class Custom(Precision):
    precision = "my own"


def test_a_precision_plugin_of_the_users_own_is_kept():
    plugin = Custom()

    assert trainer("unified", accelerator="cpu", plugins=[plugin]).precision_plugin is plugin


def test_an_accelerator_given_as_an_object_does_not_turn_autocast_off():
    """Lightning 2.6.6 builds the plugin for "cuda" then (accelerator_connector.py), and trains in float32 without saying so."""
    made = trainer("unified", accelerator=CPUAccelerator(), precision="bf16-mixed")
    made.fit(BoringModel())

    assert made.precision_plugin.device == "cpu"


def test_a_scaler_of_the_users_own_is_kept_and_one_for_another_device_is_not():
    choice = PrecisionChoice(precision="16-mixed", scaler=True, reason="as asked")
    own = torch.amp.GradScaler("cpu", init_scale=4.0)
    given = MixedPrecision("16-mixed", device="cpu", scaler=own)
    elsewhere = MixedPrecision("16-mixed", device="cuda", scaler=torch.amp.GradScaler("cuda", enabled=False))

    assert build_plugin(choice, device_type="cpu", given=given).scaler is own
    assert build_plugin(choice, device_type="cpu", given=elsewhere).scaler.is_enabled()
