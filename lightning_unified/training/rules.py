"""Which rules hold for a module's batches: those given to the strategy, else those that the module declares, else the defaults."""

from typing import Any

from lightning_unified.errors import ConfigurationError
from lightning_unified.micro_batches import MicroBatchRules

__all__ = ["HOOK", "given_to", "rules_of"]

HOOK = "configure_micro_batches"


def rules_of(module: Any, stage: str, *, given: MicroBatchRules | None = None) -> MicroBatchRules:
    """Return the rules by which batches of `module` are split in `stage`.

    Args:
        module: A LightningModule.
        stage: `"fit"`, `"validate"`, `"test"` or `"predict"`, as Lightning's `setup(stage)` has it.
        given: What the user gave to the strategy. It replaces all that the module declares.

    Raises:
        ConfigurationError: If the module's hook returns anything but `MicroBatchRules`.
    """
    if given is not None:
        return given
    hook = getattr(module, HOOK, None)
    if hook is None:
        return MicroBatchRules()
    rules = hook(stage)
    if not isinstance(rules, MicroBatchRules):
        raise ConfigurationError(
            f"{type(module).__name__}.{HOOK}({stage!r}) returned {rules!r}; return MicroBatchRules(...) from lightning_unified."
        )
    return rules


def given_to(trainer: Any) -> MicroBatchRules | None:
    """Return the rules that the user gave to the strategy of `trainer`; None without a Trainer, or where there are none."""
    policy = getattr(getattr(trainer, "strategy", None), "policy", None)
    return getattr(policy, "given_rules", None)
