"""Find the rules of a module's batches: given, declared, or the defaults."""

import pickle
from typing import Any

from lightning_unified.errors import ConfigurationError
from lightning_unified.micro_batches import MicroBatchRules

__all__ = ["HOOK", "LEFT_BEHIND", "can_be_pickled", "given_to", "rules_of"]

HOOK = "configure_micro_batches"


class _LeftBehind(MicroBatchRules):
    """Stands for the rules of a pickled strategy that could not be pickled themselves."""


LEFT_BEHIND = _LeftBehind()
"""The rules of a strategy that came from another process without its own."""


def rules_of(module: Any, stage: str, *, given: MicroBatchRules | None = None) -> MicroBatchRules:
    """Return the rules by which batches of `module` are split in `stage`.

    Args:
        module: A LightningModule.
        stage: `"fit"`, `"validate"`, `"test"` or `"predict"`, as Lightning's `setup(stage)` has it.
        given: What the user gave to the strategy. It replaces all that the module declares.

    Raises:
        ConfigurationError: If the module's hook returns anything but `MicroBatchRules`, or the strategy came from another process
            without the rules that were given to it.
    """
    if isinstance(given, _LeftBehind):
        raise ConfigurationError(
            "UnifiedStrategy(micro_batches=MicroBatchRules(...)) was sent to another process, and its functions cannot be pickled. Give functions "
            f"defined at the top of a module in place of lambdas, or define {HOOK} on {type(module).__name__}."
        )
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
    return None if policy is None else policy.batches.given


def can_be_pickled(rules: MicroBatchRules | None) -> bool:
    """Return whether another process can be given `rules`; lambdas and functions made inside functions cannot be sent."""
    try:
        pickle.dumps(rules)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
