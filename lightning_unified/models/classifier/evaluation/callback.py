"""Callback that saves a report after each validation, as JSON and as a plot."""

import json
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_unified.models.classifier.evaluation.picture import draw, figure_of
from lightning_unified.models.classifier.module import TextClassifier

__all__ = ["ClassificationReport"]


class ClassificationReport(Callback):
    """Write `<stage>.json` and `<stage>.png` after each validation and test, over earlier ones.

    Args:
        directory: Folder; None takes `plots/` in the run's folder.
        picture: Whether to plot confusion and reliability, which needs matplotlib.
    """

    def __init__(self, *, directory: str | None = None, picture: bool = True) -> None:
        self.directory, self.picture = directory, picture

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise for a module that is no classifier, before the first step.

        Raises:
            ValueError: If the module is no classifier.
        """
        if not isinstance(pl_module, TextClassifier):
            raise ValueError(  # noqa: TRY004 - a setting
                f"ClassificationReport reports on a TextClassifier, and this is {type(pl_module).__name__}; leave it out, as "
                "callbacks=default does."
            )

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write(trainer, pl_module, "validation")

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, "test")

    def _write(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        assert isinstance(module, TextClassifier)
        report = module.report
        if report is None or not trainer.is_global_zero:
            return
        folder = Path(self.directory or Path(trainer.log_dir or trainer.default_root_dir, "plots"))
        folder.mkdir(parents=True, exist_ok=True)
        record = {"epoch": trainer.current_epoch, "global_step": trainer.global_step, **report.record()}
        (folder / f"{stage}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if not self.picture:
            return
        draw(report, folder / f"{stage}.png")
        for logger in trainer.loggers:
            show = getattr(getattr(logger, "experiment", None), "add_figure", None)
            if show is not None:
                show(f"{stage}/confusion", figure_of(report), global_step=trainer.global_step)
