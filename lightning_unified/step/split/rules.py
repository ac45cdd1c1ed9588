"""Find the rules of a module's batches: passed to the strategy, declared, or the defaults."""

import pickle
from typing import Any

from lightning_unified.errors import ConfigurationError
from lightning_unified.micro_batches import MicroBatchRules

__all__ = ["HOOK", "LEFT_BEHIND", "can_be_pickled", "given_to", "rules_of"]

HOOK = "configure_micro_batches"


class _LeftBehind(MicroBatchRules):
    """Placeholder for the rules of a pickled strategy, if these could not be pickled."""


LEFT_BEHIND = _LeftBehind()
"""The rules of a strategy that came from another process without its own."""


def rules_of(module: Any, stage: str, *, given: MicroBatchRules | None = None) -> MicroBatchRules:
    """Return the rules for splitting batches of `module` in `stage`.

    A stage is `"fit"`, `"validate"`, `"test"` or `"predict"`, as in Lightning's `setup(stage)`. Rules `given` to the
    strategy replace all rules that the module declares.

    Raises:
        ConfigurationError: If the module's hook returns another type than `MicroBatchRules`, or the strategy came from another
            process without the rules that the user passed to it.
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
    """Return the rules that the user passed to the strategy of `trainer`; None without any."""
    policy = getattr(getattr(trainer, "strategy", None), "policy", None)
    return None if policy is None else policy.batches.given


def can_be_pickled(rules: MicroBatchRules | None) -> bool:
    """Return whether `rules` can be pickled.

    Lambdas and functions defined inside functions cannot be pickled.
    """
    try:
        pickle.dumps(rules)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
