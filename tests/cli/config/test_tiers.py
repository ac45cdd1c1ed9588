"""A memory tier runs on every machine.

Where the pool is smaller than its budget, the run takes what `auto` gives.
"""

import pytest
from omegaconf import OmegaConf

from lightning_unified.cli.config.composition import composed, searching
from lightning_unified.hardware import fixed_tiers, resolve_budget
from lightning_unified.hardware.simulated import PROFILES, SimulatedMachine
from tests.cli.conftest import CONF
from tests.support.lanes import crossed, some

TIERS = ("debug", "small", "medium", "large", "optimal")
HARDWARE = ("cpu", "mps", "cuda", "rocm", "dgx_spark", "jetson", "strix_halo")
OWN = {
    ("classifier", "mps"): 64,
    ("classifier", "cpu"): 16,
    ("classifier", "strix_halo"): 32,
    ("gearhead-34m", "rocm"): 32,
}
BATCHES = {"debug": 4, "small": 8, "medium": 16, "large": 32, "optimal": 64}


@pytest.mark.parametrize("machine", PROFILES)
def test_every_tier_has_a_budget_on_every_machine(machine):
    reading = SimulatedMachine(machine).reading()
    auto = resolve_budget("auto", reading).bytes

    for tier, amount in fixed_tiers().items():
        budget = resolve_budget(OmegaConf.load(f"{CONF}/memory/{tier}.yaml").memory.budget, reading)
        assert budget.bytes == (amount if amount <= reading.total.bytes else min(amount, auto))
        assert ("is less than" in budget.reason) == (amount > reading.total.bytes)


@pytest.mark.parametrize(
    ("model", "hardware", "tier"),
    crossed(["classifier", "gearhead-34m"], HARDWARE, TIERS, fast=[("classifier", "mps", "large")]),
)
def test_a_models_own_batch_on_a_hardware_comes_before_a_tiers(model, hardware, tier):
    with searching(CONF):
        config = composed([f"model={model}", f"hardware={hardware}", f"memory={tier}"]).config

    own = OmegaConf.select(config, "platform.batch_size")
    assert config.data.batch_size == (BATCHES[tier] if own is None else own)
    assert own == OWN.get((model, hardware), own)


@pytest.mark.parametrize("tier", some(TIERS, "small"))
def test_a_tiers_batch_serves_models_without_one_of_their_own(tier):
    with searching(CONF):
        assert composed(["model=gearhead", "hardware=cpu", f"memory={tier}"]).config.data.batch_size == BATCHES[tier]
        given = composed(["model=classifier", "hardware=mps", f"memory={tier}", "data.batch_size=7"]).config
        assert given.data.batch_size == 7
