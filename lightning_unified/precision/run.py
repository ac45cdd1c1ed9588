"""Verify the precision of a run once Trainer, module and optimizers exist and nothing has run."""

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_unified.errors import PrecisionError
from lightning_unified.precision.float16 import float16_warnings
from lightning_unified.precision.resolve import plugin_precision
from lightning_unified.precision.verify import verify_plugin

__all__ = ["verify_run"]


def verify_run(trainer: L.Trainer) -> None:
    """Raise if the precision would fail in the first step, or compute something else silently.

    Effects of float16 that may be intended are warned about.

    Args:
        trainer: Trainer whose strategy has been set up.

    Raises:
        PrecisionError: If the Trainer's flag was ignored, or as `verify_plugin` says.
    """
    _refuse_ignored_flag(trainer)
    plugin, strategy = trainer.precision_plugin, trainer.strategy
    kind, optimizers = strategy.root_device.type, strategy.optimizers
    verify_plugin(plugin, device_type=kind, optimizers=optimizers, clips=bool(trainer.gradient_clip_val))
    if trainer.state.fn == TrainerFn.FITTING:
        for warning in float16_warnings(trainer.lightning_module, plugin, device_type=kind, optimizers=optimizers):
            rank_zero_warn(warning)


def _refuse_ignored_flag(trainer: L.Trainer) -> None:
    """Raise if a plugin carried by the strategy made Lightning ignore `Trainer(precision=…)`.

    A flag of 32-true is indistinguishable from no flag.

    Source:
        lightning/pytorch/trainer/connectors/accelerator_connector.py, `_check_config_and_set_final_flags` (2.6.6).
    """
    connector = trainer._accelerator_connector
    flag, runs = connector._precision_flag, plugin_precision(trainer.precision_plugin)
    if connector._precision_plugin_flag is not None and flag not in ("32-true", runs):
        raise PrecisionError(
            f"Trainer(precision={flag!r}) and a strategy that carries a plugin for {runs!r}: Lightning would run the plugin without saying "
            "so. Give the plugin as Trainer(plugins=[…]) instead, or no precision to the Trainer."
        )
