"""Another project's Hydra program uses the groups by the lines of `conf/unified.yaml`."""

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from lightning_unified.strategies import UnifiedStrategy
from tests.support import ROOT
from tests.support.lanes import first_cells

CONF = ROOT / "conf"
LINES = [line.lstrip("# ") for line in (CONF / "unified.yaml").read_text().splitlines() if line.startswith("#   ")]


@pytest.fixture
def composed(tmp_path):
    """Return a function that composes the configuration of a project in `tmp_path`.

    It takes further lines of the configuration, and overrides.
    """
    # the folder in place of the installed package, so that the tests read this tree
    recipe = "\n".join(LINES).replace("pkg://lightning_unified.conf", f"file://{CONF}")

    def compose_with(*overrides, more=""):
        (tmp_path / "main.yaml").write_text(f"{recipe}\n{more}\n")
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            return compose("main", overrides=list(overrides))

    return compose_with


def test_the_recipe_is_two_lines_of_yaml():
    assert yaml.safe_load("\n".join(LINES)) == {
        "defaults": ["unified", "_self_"],
        "hydra": {"searchpath": ["pkg://lightning_unified.conf"]},
    }


@first_cells(1, ("overrides", "budget", "micro_batch_size", "batch_size"),
    [
        ((), "auto", "auto", 32),
        (("memory=small",), "up to 8GiB", 4, 8),
        (("memory=optimal", "hardware=cuda", "simulate=m2-16gb"), "up to 32GiB", 8, 64),
        (("memory=small", "platform.micro_batch_size=2", "memory.micro_batch_size=1", "data.batch_size=6"), "up to 8GiB", 1, 6),
    ],
)  # fmt: skip
def test_memory_is_a_strategy_under_every_choice(composed, overrides, budget, micro_batch_size, batch_size):
    config = composed(*overrides)
    strategy = instantiate(config.memory)

    assert isinstance(strategy, UnifiedStrategy)
    assert (strategy.policy.watch.spec, config.memory.micro_batch_size, config.data.batch_size) == (
        budget,
        micro_batch_size,
        batch_size,
    )


def test_the_projects_own_keys_take_precedence(composed):
    config = composed("memory=large", more="run_dir: here\ndata: {batch_size: 12}\nmemory: {budget: 3GiB}")

    assert (config.data.batch_size, config.memory.budget) == (12, "3GiB")
    assert config.memory.remember == "here/sizes.json"


def test_hardware_settings_resolve_too(composed):
    assert instantiate(composed("hardware=cpu").hardware).accelerator == "cpu"
