"""Several sources of a precision, user plugins and scalers: kept or refused.

None is overridden.
"""

import os
import warnings

import pytest
import torch
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import precision as stock

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import PrecisionError
from lightning_unified.precision import MixedPrecision, PrecisionChoice, build_plugin, verify_plugin
from tests.support.runs.scaled import seen

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled:UserWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="what is seen here is the absence of CUDA"),
]


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize(
    ("flag", "expected"), [(None, "32-true"), ("bf16-mixed", "bf16-mixed"), ("32-true", "32-true")]
)
def test_the_four_routes_give_the_trainers_precision(trainer, as_object, flag, expected):
    made = trainer(UnifiedStrategy() if as_object else "unified", accelerator="cpu", precision=flag)

    assert made.precision_plugin is made.strategy.precision_plugin
    assert made.precision_plugin.precision == expected
    assert type(made.precision_plugin) is (MixedPrecision if "mixed" in expected else stock.Precision)


def test_the_strategys_own_precision_is_used_if_the_trainer_names_none(trainer):
    made = trainer(UnifiedStrategy(precision="bf16-mixed"), accelerator="cpu")
    made.fit(BoringModel())

    assert made.precision == "bf16-mixed"


@pytest.mark.parametrize("flag", ["64-true", "16-true"])
def test_two_precisions_are_a_conflict_not_an_override(trainer, flag):
    with pytest.raises(PrecisionError, match=rf"precision='bf16-mixed' and the Trainer '{flag}'; give one of them"):
        trainer(UnifiedStrategy(precision="bf16-mixed"), accelerator="cpu", precision=flag)


def test_the_same_precision_by_two_names_is_no_conflict(trainer):
    assert trainer(UnifiedStrategy(precision="bf16"), accelerator="cpu", precision="bf16").precision == "bf16-mixed"


class Custom(stock.Precision):
    precision = "my own"


def test_a_precision_plugin_of_the_users_own_is_kept(trainer):
    plugin = Custom()

    assert trainer("unified", accelerator="cpu", plugins=[plugin]).precision_plugin is plugin


@pytest.mark.parametrize("asked", ["auto", "bf16-mixed"])
def test_a_users_own_plugin_beside_the_strategys_precision_is_a_conflict(trainer, asked):
    with pytest.raises(PrecisionError, match="the Trainer Custom; give one of them"):
        trainer(UnifiedStrategy(precision=asked), accelerator="cpu", plugins=[Custom()])


def test_auto_gives_way_to_what_the_trainer_names(trainer):
    made = trainer(UnifiedStrategy(precision="auto"), accelerator="cpu", precision="bf16-mixed")

    assert made.precision == "bf16-mixed"
    assert made.strategy.precision_choice.reason == "as the Trainer says"


def test_auto_on_a_mac_has_its_watermarks_from_the_budget_before_the_chip_is_asked(mac, trainer, monkeypatch):
    mac("Apple M2")
    asked_with = []
    name = torch.backends.mps.get_name
    monkeypatch.setattr(
        torch.backends.mps,
        "get_name",
        lambda: asked_with.append(os.environ.get("PYTORCH_MPS_HIGH_WATERMARK_RATIO")) or name(),
    )
    made = trainer(UnifiedStrategy(budget="60%", precision="auto"), accelerator="mps")

    assert made.precision == "bf16-mixed"
    assert asked_with and set(asked_with) == {"0.6000"}


FP16 = PrecisionChoice(precision="16-mixed", scaler=True, reason="as asked")


def test_a_live_scaler_of_the_users_own_is_kept(trainer):
    own = torch.amp.GradScaler("cpu", init_scale=4.0)
    made = trainer("unified", accelerator="cpu", plugins=[stock.MixedPrecision("16-mixed", "cpu", scaler=own)])

    assert made.precision_plugin.scaler is own
    assert seen(made) == ("cpu", "cpu", torch.float16, "cpu")
    assert made.strategy.precision_choice.scaler


def test_a_scaler_that_torch_disabled_for_want_of_cuda_is_refused(mac, trainer):
    """A script written for CUDA, on a Mac: `scale()` is the identity.

    float16 would train unscaled.
    """
    mac()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        disabled = torch.cuda.amp.GradScaler()
    plugins = [stock.MixedPrecision("16-mixed", "mps", scaler=disabled)]

    assert seen(trainer("auto", plugins=list(plugins))) == ("mps", "mps", torch.float16, None)
    with pytest.raises(PrecisionError, match=r"scaler is disabled.* give torch.amp.GradScaler\('mps'\)"):
        trainer("unified", plugins=plugins)


def test_a_live_scaler_for_another_device_is_refused(mac, trainer):
    mac()
    with pytest.raises(PrecisionError, match=r"scaler is for cpu"):
        trainer("unified", plugins=[stock.MixedPrecision("16-mixed", "mps", scaler=torch.amp.GradScaler("cpu"))])


def test_a_scaler_that_torch_disables_is_an_error():
    """Without CUDA torch disables its scaler with one warning.

    Training would continue unscaled.
    """
    with pytest.raises(PrecisionError, match="disabled gradient scaler"):
        build_plugin(FP16, device_type="cuda")


def test_what_was_built_is_what_the_check_asks_for(mac, trainer):
    mac()
    plugin = trainer("unified", accelerator=MPSAccelerator(), precision="16-mixed").precision_plugin
    verify_plugin(plugin, device_type="mps", optimizers=[], clips=True)
