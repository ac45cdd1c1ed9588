"""One cell of `models/classifier/rivals.py`, in this process.

A cell is two epochs of one trainer on one shape.
"""

import fcntl
import logging
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
from typing_extensions import override

from benchmarks.models.classifier.rivals import MODELS
from lightning_unified import CudaGraphs, GradientHealth, MemoryMonitor, PressureGuard
from lightning_unified.callbacks import RunCSVLogger
from lightning_unified.cli.run.throughput import Throughput
from lightning_unified.data.loader import LoaderOptions
from lightning_unified.data.packing import choose_buckets
from lightning_unified.data.resumable import ResumableData
from lightning_unified.models.classifier import TextClassifier
from lightning_unified.models.classifier.data.label_rows import LabelRows, zeros
from lightning_unified.strategies import UnifiedStrategy

__all__ = ["run_cell"]

LONGEST, SHORTEST, EPOCHS, WORKERS, LENGTHS = 128, 6, 2, 4, 4
ON_GPU = torch.cuda.is_available()


def run_cell(
    cell: str, model: str, *, rows: int, batch: int, budget: int | None = None, turn: Path | None = None
) -> dict[str, Any]:
    """Return samples a second of both epochs and the peaks in bytes.

    Args:
        cell: Who trains.
        model: Of `MODELS`.
        rows: Texts of an epoch.
        batch: Of them in a step.
        budget: What a run of ours may use, in bytes.
        turn: A file that whoever measures holds.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    texts, labels = _texts(rows, vocabulary=MODELS[model].get("vocab_size", 30000))
    torch.manual_seed(0)
    marks = Marks()
    if turn is not None:
        holder = turn.open("w")
        fcntl.flock(holder, fcntl.LOCK_EX)  # until this process ends
    began = time.perf_counter()
    if cell.startswith(("ours", "graphs")):
        strategy = UnifiedStrategy(budget=budget, recompute=False) if budget else UnifiedStrategy()
        more = [CudaGraphs(of="network")] if cell.startswith("graphs") else []
        known = _ours(MODELS[model], texts, labels, batch=batch, marks=marks, strategy=strategy, more=more)
    else:
        known = _rival(MODELS[model], texts, labels, batch=batch, marks=marks, padding=cell)
    return {
        "samples_per_second": [round(rows // batch * batch / seconds, 1) for seconds in marks.seconds],
        "peak_bytes": marks.peak or None,
        "reserved_bytes": marks.reserved or None,
        "whole_seconds": round(time.perf_counter() - began, 2),
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
        "transformers": version("transformers"),
        **known,
    }


class Marks:
    """Times at device synchronisations, and the highest peaks seen at them.

    Peaks are of allocated and of reserved bytes.
    """

    def __init__(self) -> None:
        self._moments: list[float] = []
        self.peak = self.reserved = 0

    def __call__(self) -> None:
        """Take one."""
        if ON_GPU:
            torch.cuda.synchronize()
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        self._moments.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Between one and the next."""
        return [after - before for before, after in zip(self._moments, self._moments[1:], strict=False)]


def _texts(rows: int, *, vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """Return token ids of texts as long as tweets are, and their classes."""
    draw = random.Random(0)
    sizes = [min(LONGEST, max(SHORTEST, int(draw.lognormvariate(2.9, 0.45)))) for _ in range(rows)]
    return [draw.choices(range(5, vocabulary), k=size) for size in sizes], [row % 2 for row in range(rows)]


class _Texts(ResumableData):
    """The made-up texts as `LabelData` has real ones: its rows, its loader, its few lengths."""

    def __init__(self, texts: list[list[int]], labels: list[int], *, batch: int) -> None:
        super().__init__(
            LoaderOptions(
                batch_size=batch,
                drop_last=True,
                num_workers=WORKERS,
                persistent_workers=True,
                prefetch_factor=2,
                start_method="forkserver" if ON_GPU else "fork",
                pin_memory=ON_GPU,
            )
        )
        self.label_names, self.text_length = ["0", "1"], LONGEST
        self.padded_lengths = choose_buckets([len(ids) for ids in texts], longest=LONGEST, most=LENGTHS, multiple=8)
        self._rows = LabelRows(texts, labels, lengths=self.padded_lengths, pad_id=0)
        self._tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))

    @property
    @override
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    @override
    def rows(self) -> tuple[LabelRows, LabelRows]:
        return self._rows, self._rows

    @override
    def _zeros(self, rows: int) -> dict[str, Tensor]:
        return zeros(rows, LONGEST)

    @override
    def describe_line(self) -> str:
        return f"{len(self._rows)} made-up texts"


class _Epochs(Callback):
    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._marks()

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._marks()


def _ours(
    sizes: dict[str, Any],
    texts: list[list[int]],
    labels: list[int],
    *,
    batch: int,
    marks: Marks,
    strategy: UnifiedStrategy,
    more: Sequence[Callback],
) -> dict[str, Any]:
    data = _Texts(texts, labels, batch=batch)
    module = TextClassifier(
        architecture={"model_type": "bert", **sizes},
        load_pretrained=False,
        learning_rate=5e-5,
        optimizer_kernel="fused",
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cuda" if ON_GPU else "cpu",
            devices=1,
            strategy=strategy,
            precision="bf16-mixed",
            max_epochs=EPOCHS,
            limit_val_batches=0,
            gradient_clip_val=1.0,
            log_every_n_steps=10,
            callbacks=[
                _Epochs(marks),
                MemoryMonitor(every_n_batches=10),
                GradientHealth(),
                PressureGuard(),
                Throughput(),
                *more,
            ],
            logger=RunCSVLogger(save_dir=folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, datamodule=data)
    return {
        "lengths": data.padded_lengths,
        "micro_batch_size": strategy.policy.sizing.micro_batch_size,
        "events": strategy.policy.events,
        "loss": float(trainer.callback_metrics["train/loss"]),
        "lightning": L.__version__,
    }


class _Moments(TrainerCallback):
    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._marks()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._marks()


class _Rows(torch.utils.data.Dataset):
    def __init__(self, texts: list[list[int]], labels: list[int]) -> None:
        self._texts, self._labels = [torch.tensor(ids) for ids in texts], labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._texts[index], "labels": self._labels[index]}


def _rival(
    sizes: dict[str, Any], texts: list[list[int]], labels: list[int], *, batch: int, marks: Marks, padding: str
) -> dict[str, Any]:
    grouped: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
    if "train_sampling_strategy" not in TrainingArguments.__dataclass_fields__:
        grouped = {"group_by_length": True}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=batch,
            num_train_epochs=EPOCHS,
            bf16=True,
            use_cpu=not ON_GPU,
            report_to="none",
            save_strategy="no",
            logging_steps=10**6,
            disable_tqdm=True,
            dataloader_num_workers=WORKERS,
            dataloader_persistent_workers=True,
            dataloader_drop_last=True,
            optim="adamw_torch_fused",
            **(grouped if padding == "grouped" else {}),
        )
        trainer = Trainer(
            model=BertForSequenceClassification(BertConfig(**{"num_labels": 2, **sizes})),
            args=arguments,
            train_dataset=_Rows(texts, labels),
            data_collator=_collate(LONGEST if padding == "pad128" else None),
            callbacks=[_Moments(marks)],
        )
        ended = trainer.train()
    return {"loss": ended.training_loss, "own_samples_per_second": ended.metrics["train_samples_per_second"]}


def _collate(length: int | None) -> Callable[[list[dict[str, Any]]], dict[str, Tensor]]:
    """Return what pads rows to `length`, or else to the longest of them."""

    def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = length or max(len(row["input_ids"]) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for index, row in enumerate(rows):
            size = len(row["input_ids"])
            ids[index, :size] = row["input_ids"]
            mask[index, :size] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([row["labels"] for row in rows])}

    return padded
