"""Callback that evaluates rate and distortion against baselines during training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_unified.models.compressor.evaluation import held_out
from lightning_unified.models.compressor.evaluation.evaluate import KEEPS, EvaluationOptions, evaluate
from lightning_unified.models.compressor.evaluation.report import write_record
from lightning_unified.models.compressor.module import Compressor

__all__ = ["EvaluateCompression"]


class EvaluateCompression(Callback):
    """Evaluate after every n-th validation epoch, log the policy's values, save record and plot.

    It logs for each budget k: `val/dropped_cross_entropy@k`, `val/continuation_perplexity@k`, and `val/margin@k`, the policy's margin
    over the best baseline in nats per dropped token (below 0: the baseline is better).

    Args:
        every_n_epochs: Evaluate after each n-th epoch's validation.
        keeps: The budgets.
        texts: Held-out documents; None takes the validation side of the run's data module.
        corpus: Training documents for counts; None takes the training side.
        documents: Number of held-out documents; None for all.
        per_document: Pieces of a document at most.
        length: Tokens of a piece's prefix; None takes as many as in training.
        continuation: Tokens after it; None takes a quarter of the prefix.
        batch_size: Pieces of a batch.
        reconstruct: Whether to write texts for ROUGE-L, the slowest part.
        resamples: Resamples of bootstrap and permutation test.
        directory: Folder of records; None takes `compression/` in the run's folder.

    Raises:
        ValueError: If a number is out of range, or only one of texts and corpus is given.
    """

    def __init__(
        self,
        *,
        every_n_epochs: int = 1,
        keeps: Sequence[float] = KEEPS,
        texts: Sequence[str] | None = None,
        corpus: Sequence[str] | None = None,
        documents: int | None = 20,
        per_document: int = 2,
        length: int | None = None,
        continuation: int | None = None,
        batch_size: int = 32,
        reconstruct: bool = False,
        resamples: int = 1000,
        directory: str | None = None,
    ) -> None:
        if every_n_epochs < 1:
            raise ValueError(f"every_n_epochs={every_n_epochs}; give 1 or more.")
        if (texts is None) != (corpus is None):
            raise ValueError("texts and corpus belong together; give both, or neither for those of the data module.")
        self.every_n_epochs, self.documents, self.directory = every_n_epochs, documents, directory
        self.options = EvaluationOptions(
            keeps=tuple(keeps),
            length=length,
            continuation=continuation,
            per_document=per_document,
            batch_size=batch_size,
            reconstruct=reconstruct,
            repeats=0,
            resamples=resamples,
        )
        self._sides = None if texts is None or corpus is None else (list(corpus), list(texts))

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise a ValueError before the first step if no evaluation is possible.

        The module is no compressor, or there are no held-out texts.
        """
        if not isinstance(pl_module, Compressor):
            raise ValueError(  # noqa: TRY004 - a setting
                f"EvaluateCompression evaluates a Compressor, and this is {type(pl_module).__name__}; leave it out, as "
                "callbacks=default does."
            )
        if self._sides is None:
            held_out.require_described(_settings(trainer))

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        assert isinstance(pl_module, Compressor)
        if self._sides is None:
            self._sides = held_out.sides(_settings(trainer))
        corpus, texts = self._sides
        record = evaluate(pl_module, texts[: self.documents], corpus=corpus, options=self.options)
        for name, value in _figures(record).items():
            pl_module.log(name, value)
        if trainer.is_global_zero:
            self._save({"epoch": trainer.current_epoch, "global_step": trainer.global_step, **record}, trainer)

    def _save(self, record: dict[str, Any], trainer: Trainer) -> None:
        folder = self.directory or Path(trainer.log_dir or trainer.default_root_dir, "compression")
        write_record(record, Path(folder), name=f"epoch={record['epoch']}-step={record['global_step']}")


def _settings(trainer: Trainer) -> Mapping[str, Any]:
    return getattr(getattr(trainer, "datamodule", None), "hparams", {})


def _figures(record: dict[str, Any]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for keep in record["settings"]["keeps"]:
        rows = {row["method"]: row for row in record["rows"] if row["keep"] == keep}
        lost = {method: row["dropped_cross_entropy"]["mean"] for method, row in rows.items()}
        policy = lost.pop("policy")
        figures[f"val/dropped_cross_entropy@{keep}"] = policy
        figures[f"val/continuation_perplexity@{keep}"] = rows["policy"]["continuation_perplexity"]["mean"]
        figures[f"val/margin@{keep}"] = min(lost.values()) - policy
    return figures
