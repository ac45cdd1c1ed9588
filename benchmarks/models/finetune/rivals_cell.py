"""One cell of `models/finetune/rivals.py`: one trainer in one setting, in this process."""

import importlib.metadata
import logging
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, TrainerCallback
from typing_extensions import override

from lightning_unified import GradientHealth, MemoryMonitor, PressureGuard
from lightning_unified.callbacks import RunCSVLogger
from lightning_unified.data.loader import LoaderOptions
from lightning_unified.data.resumable import ResumableData
from lightning_unified.models.causal_lm.weights import build_language_model
from lightning_unified.models.finetune import Finetune
from lightning_unified.models.finetune.data.answers import Encoded
from lightning_unified.models.finetune.data.rows import ExampleRows
from lightning_unified.models.finetune.presets import PRESETS
from lightning_unified.strategies import UnifiedStrategy

__all__ = ["measure"]

ROWS, LENGTH = 16, 1024
WARM_UP, STEPS = 17, 6  # exactness checks run at split batches 1, 2, 4, 8, 16 and 32
PRESET_OF = {"smollm2": "smollm2_1_7b", "qwen": "qwen2_5_3b"}
TYPES = {"smollm2": "llama", "qwen": "qwen2"}  # of a smoke test's tiny model
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LEARNING_RATE = 2e-4
PAD = 0
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def measure(
    model: str, lengths: str, trainer: str, *, smoke: bool, budget: int | None = None, **settings: Any
) -> dict[str, Any]:
    """Return tokens per second and the peaks in bytes of one trainer.

    Args:
        model: A key of `PRESET_OF`.
        lengths: "even" or "ragged".
        trainer: "ours", "trl" or "peft".
        smoke: Train a tiny model on short rows.
        budget: Bytes that ours may use.
        settings: Arguments of the trainer's function.
    """
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "transformers", "trl", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.manual_seed(0)
    preset, architecture = PRESET_OF[model], None
    if smoke:
        preset = "finetune-tiny"
        architecture = {**PRESETS[preset].architecture, "model_type": TYPES[model]}
    sizes = dict(architecture or PRESETS[preset].architecture)
    length = 64 if smoke else LENGTH
    texts = _texts(lengths, length=length, vocabulary=int(sizes["vocab_size"]))
    window = Window()
    began = time.perf_counter()
    if trainer == "ours":
        packed = lengths == "ragged"
        train = _ours(preset, architecture, texts, window, length=length, packed=packed, budget=budget, **settings)
    else:
        with torch.device(DEVICE):
            network = build_language_model(sizes, dtype="bfloat16")
        if trainer == "trl":
            settings["length"] = length
        train = {"trl": _trl, "peft": _peft}[trainer](network, texts, window, **settings)
    window.reset()
    built = time.perf_counter()
    known = train()
    return {
        **window.figures(),
        "build_seconds": round(built - began, 1),
        "fit_seconds": round(time.perf_counter() - built, 1),
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
        "versions": {name: _version(name) for name in ("torch", "transformers", "peft", "trl", "triton")},
        **known,
    }


class Window:
    """Time of the steps after the warm-up, between device synchronizations, and all peaks."""

    def __init__(self) -> None:
        self.tokens: list[int | Tensor] = []
        self._ended, self._moments = 0, [0.0]
        self._peak = self._reserved = 0

    def reset(self) -> None:
        """Forget what construction took."""
        if ON_GPU:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._moments = [time.perf_counter()]

    def count(self, ids: Tensor) -> None:
        """Count the tokens of a step's batch; pads are none."""
        self.tokens.append((ids != PAD).sum())

    def end(self) -> None:
        """Mark the end of a step."""
        self._ended += 1
        if self._ended in (WARM_UP, WARM_UP + STEPS):
            if ON_GPU:
                torch.cuda.synchronize()
                self._peak, self._reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            self._moments.append(time.perf_counter())

    def figures(self) -> dict[str, Any]:
        """Return tokens per second of the compared steps and the peaks of all."""
        began, warm, done = self._moments
        tokens = sum(int(count) for count in self.tokens[WARM_UP : WARM_UP + STEPS])
        return {
            "tokens_per_second": round(tokens / (done - warm), 1),
            "seconds_per_step": round((done - warm) / STEPS, 4),
            "warm_up_seconds": round(warm - began, 2),
            "tokens": tokens,
            "peak_bytes": self._peak or None,
            "reserved_bytes": self._reserved or None,
        }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _texts(lengths: str, *, length: int, vocabulary: int) -> list[list[int]]:
    """Return random token ids of even or log-normal lengths, with equally many tokens."""
    draw = random.Random(0)
    rows = ROWS * (WARM_UP + STEPS + 1)
    sizes = [length] * rows
    if lengths == "ragged":
        sizes = []
        while sum(sizes) < rows * length:
            sizes.append(round(min(length, max(length / 32, draw.lognormvariate(0, 0.7) * 0.4 * length))))
    return [draw.choices(range(2, vocabulary), k=size) for size in sizes]


class _Texts(ResumableData):
    """The texts as `FinetuneData` has a user's: its rows, its loader."""

    def __init__(self, texts: list[list[int]], *, length: int, packed: bool) -> None:
        super().__init__(LoaderOptions(batch_size=ROWS, drop_last=True, pin_memory=ON_GPU))
        self._packed, self._length = packed, length
        encoded = [Encoded(np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=bool)) for ids in texts]
        self._rows = ExampleRows(encoded, length=length, packed=packed, pad_id=PAD)

    @property
    @override
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(models.WordLevel({"<pad>": PAD}, unk_token="<pad>"))

    @property
    @override
    def rows(self) -> tuple[ExampleRows, ExampleRows]:
        return self._rows, self._rows

    @override
    def _zeros(self, rows: int) -> dict[str, Tensor]:
        tokens = torch.zeros(rows, self._length, dtype=torch.int64)
        return {name: tokens.clone() for name in ("tokens", "labels", "positions")[: 3 if self._packed else 2]}

    @override
    def describe_line(self) -> str:
        return f"{len(self._rows)} rows"


class _Steps(Callback):
    def __init__(self, window: Window) -> None:
        self._window = window
        self.plan: Any = None

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._window.count(batch["tokens"])
        self._window.end()
        self.plan = getattr(trainer.strategy, "plan", None)


def _ours(
    preset: str,
    architecture: dict[str, Any] | None,
    texts: list[list[int]],
    window: Window,
    *,
    length: int,
    packed: bool,
    budget: int | None,
    compiled: bool = False,
) -> Callable[[], dict[str, Any]]:
    with torch.device(DEVICE):
        module = Finetune(
            preset=preset,
            architecture=architecture,
            load_pretrained=False,
            dtype="bfloat16",
            learning_rate=LEARNING_RATE,
            lora_targets=TARGETS,
        )
    strategy = UnifiedStrategy(budget=budget or "auto", compile="blocks" if compiled else False)
    data = _Texts(texts, length=length, packed=packed)
    folder, steps = tempfile.mkdtemp(), _Steps(window)
    trainer = L.Trainer(
        accelerator=DEVICE,
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=WARM_UP + STEPS,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        callbacks=[steps, MemoryMonitor(every_n_batches=10), GradientHealth(), PressureGuard()],
        logger=RunCSVLogger(save_dir=folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )

    def train() -> dict[str, Any]:
        trainer.fit(module, datamodule=data)
        prediction = getattr(steps.plan, "prediction", None)
        return {
            "budget": budget,
            "micro_batch_size": strategy.policy.sizing.micro_batch_size,
            "recomputed": getattr(steps.plan, "recomputed", None),
            "loss_chunk": getattr(steps.plan, "loss_chunk", None),
            "predicted_bytes": getattr(prediction, "peak_bytes", None),
            "predicted_seconds": getattr(prediction, "seconds", None),
            "events": strategy.policy.events,
            "loss": float(trainer.callback_metrics["train/loss"]),
            "lightning": L.__version__,
        }

    return train


def _adapters() -> LoraConfig:
    return LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM")


def _peft(
    network: nn.Module, texts: list[list[int]], window: Window, *, recompute: bool
) -> Callable[[], dict[str, Any]]:
    """Train on padded rows by a loop of a few lines."""
    model: Any = get_peft_model(network, _adapters())  # pyright: ignore[reportArgumentType]
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def train() -> dict[str, Any]:
        loss = torch.zeros(())
        for step in range(WARM_UP + STEPS):
            rows = [torch.tensor(ids) for ids in texts[step * ROWS : (step + 1) * ROWS]]
            ids = pad_sequence(rows, batch_first=True, padding_value=PAD).to(DEVICE)
            mask = ids != PAD
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = model(input_ids=ids, attention_mask=mask.long(), labels=ids.where(mask, -100)).loss
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            window.count(ids)
            window.end()
        return {"loss": float(loss)}

    return train


class _Moments(TrainerCallback):
    def __init__(self, window: Window) -> None:
        self._window = window

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._window.end()


def _trl(
    network: nn.Module, texts: list[list[int]], window: Window, *, length: int, rows: str, recompute: bool | str
) -> Callable[[], dict[str, Any]]:
    """Train by `SFTTrainer`, with rows "padded", packed unmixed ("bfd"), or "wrapped"."""
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    packing: dict[str, Any] = {} if rows == "padded" else {"packing": True, "packing_strategy": rows}
    checkpointing = {"use_reentrant": False} | ({"selective": True} if recompute == "selective" else {})
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=WARM_UP + STEPS,
        per_device_train_batch_size=ROWS,
        max_length=length,
        gradient_checkpointing=bool(recompute),
        gradient_checkpointing_kwargs=checkpointing if recompute else None,
        learning_rate=LEARNING_RATE,
        bf16=True,
        use_cpu=not ON_GPU,
        report_to="none",
        save_strategy="no",
        logging_steps=100,
        disable_tqdm=True,
        **packing,
    )
    vocabulary: int = network.config.vocab_size  # pyright: ignore[reportAssignmentType, reportAttributeAccessIssue]
    trainer = SFTTrainer(
        model=network,  # pyright: ignore[reportArgumentType]
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": texts, "labels": texts}),
        processing_class=_tokenizer(vocabulary),
        peft_config=_adapters(),
        callbacks=[_Moments(window)],
    )
    collate = trainer.data_collator

    def counted(examples: Any) -> Any:
        batch = collate(examples)
        window.count(batch["input_ids"])
        return batch

    trainer.data_collator = counted
    return lambda: {"loss": trainer.train().training_loss}


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, "<eos>": 1} | {f"w{token}": token for token in range(2, vocabulary)}
    own = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<eos>")
