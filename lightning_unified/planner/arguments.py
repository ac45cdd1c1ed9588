"""Check the arguments of `predict` and `plan`."""

from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from lightning_unified.cost_model.rates import Rates
from lightning_unified.errors import ConfigurationError, check_count
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.step.split import tensors_in

__all__ = ["check_recompute", "check_step_arguments"]


def check_step_arguments(module: Any, batch: Any, *, micro_batch_size: Any, trainer: Any, rates: Any) -> None:
    """Refuse arguments of another type than documented.

    Raises:
        ConfigurationError: With the argument's name, its value and the allowed values.
    """
    if not isinstance(module, L.LightningModule):
        is_class = isinstance(module, type) and issubclass(module, L.LightningModule)
        given = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        hint = f"; write {module.__name__}(...)" if is_class else ""
        raise ConfigurationError(f"module is {given}: give an instance of a LightningModule{hint}.")
    _check_batch(batch)
    if micro_batch_size is not None:
        check_count("micro_batch_size", micro_batch_size)
    if trainer is not None and not isinstance(trainer, L.Trainer):
        raise ConfigurationError(f"trainer is a {type(trainer).__name__}: give a lightning.Trainer, or None.")
    if rates is not None and not isinstance(rates, Rates):
        hint = f", as in tabled_rates({rates!r})" if isinstance(rates, str) else ""
        raise ConfigurationError(f"rates={rates!r}: give Rates{hint}, or None.")


def _check_batch(batch: Any) -> None:
    if batch is None or isinstance(batch, (DataLoader, L.LightningDataModule)):
        hint = "; of a loader, next(iter(loader))" if isinstance(batch, DataLoader) else ""
        raise ConfigurationError(
            f"batch is a {type(batch).__name__}: give one whole batch, as training_step gets it{hint}."
        )
    tensors = [one for one in tensors_in(batch) if one.ndim]
    if tensors and not any(len(one) for one in tensors):
        raise ConfigurationError("batch has no rows: give one of the size that you train with.")


def check_recompute(given: Any, *, others: tuple[str | None, ...], policies: bool = False) -> None:
    """Refuse a `recompute` of a wrong type or value.

    A bool, one of `others`, and a policy, where policies are allowed, are right.

    Raises:
        ConfigurationError: With the value and the allowed values.
    """
    if isinstance(given, bool) or ((given is None or isinstance(given, str)) and given in others):
        return
    if not (policies and isinstance(given, RecomputePolicy)):
        raise ConfigurationError(f"recompute={given!r}: give True, False or {', '.join(map(repr, others))}.")
