"""Every memory option is an argument of both strategies, with the same default."""

import inspect
from dataclasses import fields

import pytest

from lightning_unified import UnifiedDDPStrategy, UnifiedStrategy
from lightning_unified.options import MemoryOptions


@pytest.mark.parametrize(
    ("strategy", "lacks"), [(UnifiedStrategy, set()), (UnifiedDDPStrategy, {"simulate", "detect_faults"})]
)
def test_a_strategy_takes_every_memory_option_and_passes_it_on(strategy, lacks):
    arguments = inspect.signature(strategy.__init__).parameters
    defaults = {field.name: field.default for field in fields(MemoryOptions) if field.name not in lacks}

    assert {name: arguments[name].default for name in defaults if name in arguments} == defaults
    assert strategy(recompute=True, remember="sizes.json", window_mean="terms").policy.options == MemoryOptions(
        recompute=True, remember="sizes.json", window_mean="terms"
    )
