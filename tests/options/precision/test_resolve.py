"""Resolution of Trainer flag and strategy precision, under Lightning 2.6.6 and unified."""

import lightning as L
import pytest
import torch
from lightning.fabric.accelerators import MPSAccelerator as FabricsMPS
from lightning.pytorch.accelerators import CPUAccelerator, MPSAccelerator
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import precision as stock
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import ConfigurationError, PrecisionError
from tests.support.runs.scaled import seen

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:CUDA is not available or torch_xla is imported:UserWarning"),
    pytest.mark.filterwarnings("ignore:GPU available but not used:UserWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="what is seen here is the absence of CUDA"),
]


@pytest.mark.parametrize("strategy", ["auto", "unified"])
@pytest.mark.parametrize("accelerator", ["mps", "gpu", "auto"])
@pytest.mark.parametrize(
    ("precision", "expected"),
    [("16-mixed", (torch.float16, "mps")), ("bf16-mixed", (torch.bfloat16, None))],
)
def test_the_accelerator_as_a_string_is_right_under_both(mac, trainer, strategy, accelerator, precision, expected):
    mac()

    assert seen(trainer(strategy, accelerator=accelerator, precision=precision)) == ("mps", "mps", *expected)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_the_accelerator_as_an_object_trains_in_float32_under_lightning_alone(mac, trainer, precision):
    mac()

    assert seen(trainer("auto", accelerator=MPSAccelerator(), precision=precision)) == ("mps", "cuda", None, None)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("16-mixed", (torch.float16, "mps")), ("bf16-mixed", (torch.bfloat16, None))],
)
def test_the_accelerator_as_an_object_is_repaired(mac, trainer, precision, expected):
    mac()

    assert seen(trainer("unified", accelerator=MPSAccelerator(), precision=precision)) == ("mps", "mps", *expected)


def test_a_strategy_with_an_accelerator_object_trains_in_float32_under_lightning(mac, trainer):
    mac()
    carrying = SingleDeviceStrategy("mps", accelerator=MPSAccelerator())

    assert seen(trainer(carrying, precision="16-mixed")) == ("mps", "cuda", None, None)


def test_a_strategy_that_carries_an_accelerator_object_is_repaired(mac, trainer):
    mac()
    carrying = UnifiedStrategy()
    carrying.accelerator = MPSAccelerator()

    assert seen(trainer(carrying, precision="16-mixed")) == ("mps", "mps", torch.float16, "mps")


def test_a_cpu_object_with_fp16_trains_in_float32_under_lightning_alone(trainer):
    assert seen(trainer("auto", accelerator=CPUAccelerator(), precision="16-mixed")) == ("cpu", "cuda", None, None)


def test_a_cpu_object_with_fp16_is_refused(trainer):
    with pytest.raises(PrecisionError, match="use bf16-mixed or 32-true"):
        trainer("unified", accelerator=CPUAccelerator(), precision="16-mixed")


def test_a_cpu_object_with_bf16_is_repaired(trainer):
    made = trainer("unified", accelerator=CPUAccelerator(), precision="bf16-mixed")
    made.fit(BoringModel())

    assert seen(made) == ("cpu", "cpu", torch.bfloat16, None)


@pytest.mark.parametrize("strategy", ["auto", "unified"])
def test_a_cpu_by_name_with_fp16_becomes_bf16_with_lightnings_warning(trainer, strategy):
    with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
        made = trainer(strategy, accelerator="cpu", precision="16-mixed")

    assert seen(made) == ("cpu", "cpu", torch.bfloat16, None)


@pytest.mark.parametrize("accelerator", ["auto", "mps"])
def test_a_strategy_made_for_a_device_is_right_under_lightning_and_ours_takes_none(mac, trainer, accelerator):
    mac()
    made = trainer(SingleDeviceStrategy("mps"), accelerator=accelerator, precision="16-mixed")

    assert seen(made) == ("mps", "mps", torch.float16, "mps")
    with pytest.raises(TypeError, match="unexpected keyword argument 'device'"):
        UnifiedStrategy(device="mps")


def test_a_strategy_by_name_is_right_under_both(mac, trainer):
    mac()
    StrategyRegistry.register("single_mps", SingleDeviceStrategy, device="mps")
    try:
        for name in ("single_mps", "unified"):
            assert seen(trainer(name, precision="16-mixed")) == ("mps", "mps", torch.float16, "mps")
    finally:
        StrategyRegistry.remove("single_mps")


def test_plain_lightning_does_not_notice_autocast_on_another_device(mac, trainer):
    mac()

    assert seen(trainer(SingleDeviceStrategy("cpu"), accelerator="mps", precision="bf16-mixed"))[:2] == ("cpu", "mps")


def test_a_module_and_its_autocast_on_two_devices_are_refused_before_the_first_step(trainer):
    made = trainer("unified", accelerator="cpu", precision="bf16-mixed")
    made.strategy.precision_plugin = stock.MixedPrecision("bf16-mixed", "mps")
    with pytest.raises(
        PrecisionError, match=r"built for mps and the module is on cpu.*Pass the accelerator as a string"
    ):
        made.fit(BoringModel())


def test_a_plugin_carried_by_the_strategy_silences_the_flag_under_lightning(mac, trainer):
    mac()
    carrying = SingleDeviceStrategy("mps", precision_plugin=stock.MixedPrecision("16-mixed", "mps"))

    assert trainer(carrying, precision="bf16-mixed").precision == "16-mixed"


def test_a_plugin_carried_by_the_strategy_and_another_flag_are_refused(trainer):
    carrying = UnifiedStrategy()
    carrying.precision_plugin = stock.MixedPrecision("bf16-mixed", "cpu")
    made = trainer(carrying, accelerator="cpu", precision="64-true")
    with pytest.raises(PrecisionError, match=r"precision='64-true'.* carries a plugin for 'bf16-mixed'"):
        made.fit(BoringModel())


def test_a_plugin_that_the_strategy_carries_runs_if_no_flag_contradicts_it(trainer):
    for flag in (None, "bf16-mixed"):
        carrying = UnifiedStrategy()
        carrying.precision_plugin = stock.MixedPrecision("bf16-mixed", "cpu")
        made = trainer(carrying, accelerator="cpu", precision=flag)
        made.fit(BoringModel())

        assert seen(made) == ("cpu", "cpu", torch.bfloat16, None)


@pytest.mark.parametrize("strategy", ["auto", "unified"])
def test_a_plugin_beside_a_flag_is_refused_by_lightning_itself(trainer, strategy):
    with pytest.raises(ValueError, match="Received both `precision=bf16-mixed` and `plugins="):
        trainer(
            strategy, accelerator="cpu", precision="bf16-mixed", plugins=[stock.MixedPrecision("bf16-mixed", "cpu")]
        )


def test_a_plugin_made_for_another_device_is_repaired(mac, trainer):
    mac()
    plugins = [stock.MixedPrecision("16-mixed", "cuda")]

    assert seen(trainer("auto", plugins=list(plugins))) == ("mps", "cuda", None, None)
    assert seen(trainer("unified", plugins=list(plugins))) == ("mps", "mps", torch.float16, "mps")


@pytest.mark.parametrize("strategy", ["auto", "unified"])
@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_half_precision_never_has_a_scaler(mac, trainer, strategy, precision):
    mac()
    plugin = trainer(strategy, accelerator="mps", precision=precision).precision_plugin

    assert (type(plugin), plugin.precision) == (stock.HalfPrecision, precision)
    assert not hasattr(plugin, "scaler")


def test_float64_on_mps_is_accepted_by_lightning_and_refused_at_once_here(mac, trainer):
    mac()

    assert trainer("auto", accelerator="mps", precision="64-true").precision == "64-true"
    with pytest.raises(PrecisionError, match="Metal has no float64"):
        trainer("unified", accelerator="mps", precision="64-true")
    with pytest.raises(PrecisionError, match="Metal has no float64"):
        trainer(UnifiedStrategy(precision="64-true"), accelerator="mps")


def test_fabric_has_the_fault_of_the_accelerator_object_as_well(mac):
    mac()
    plugin = L.Fabric(accelerator=FabricsMPS(), precision="16-mixed")._precision

    assert (plugin.device, plugin.scaler.is_enabled()) == ("cuda", False)


def test_fabric_is_informed_that_the_strategy_is_the_trainers(mac):
    mac()
    with pytest.raises(ValueError, match=r"<UnifiedStrategy: for lightning.Trainer\(strategy=…\) only"):
        L.Fabric(strategy=UnifiedStrategy())
    with pytest.raises(ConfigurationError, match=r"for lightning.Trainer.* Write L.Trainer\(strategy=.unified.\)"):
        L.Fabric(accelerator=FabricsMPS(), precision="16-mixed", strategy="unified")
