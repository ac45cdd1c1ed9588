"""One cell of `models/grpo/rivals.py`: one trainer in one setting, in this process."""

import importlib.metadata
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from typing_extensions import override

from lightning_unified.models.grpo import GRPO
from lightning_unified.models.grpo.rollout import Completions, Sampler
from lightning_unified.strategies import UnifiedStrategy

__all__ = ["measure"]

QWEN_3B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
TINY = {
    "vocab_size": 1000,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
PROMPT = " ".join(f"w{token}" for token in range(2, 150))  # 148 tokens
LEARNING_RATE = 1e-6
FEW_TOKENS = 8  # of a rival's first iteration
ON_GPU = torch.cuda.is_available()


def measure(
    side: str,
    *,
    new: int,
    group: int,
    at_once: int,
    recompute: bool,
    steps: dict[str, int],
    smoke: bool,
    turn: Callable[[], None],
) -> dict[str, Any]:
    """Return seconds of each iteration and the peak in bytes.

    Args:
        side: "ours" or "rival".
        new: Tokens of a completion.
        group: Completions of the prompt.
        at_once: Of them in one loss pass.
        recompute: Activations in the backward pass.
        steps: Iterations, by side.
        smoke: Of a tiny model.
        turn: Waits until it is this cell's turn; called after the first of several iterations, or before the only one.
    """
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "transformers", "trl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    sizes = TINY if smoke else QWEN_3B
    model, tokenizer = _model(sizes), _tokenizer(sizes["vocab_size"])
    marks = Marks(turn, has_warm_up=steps[side] > 1)
    make = {"ours": _ours, "rival": _rival}[side]
    train = make(
        model, tokenizer, marks=marks, new=new, group=group, at_once=at_once, recompute=recompute, steps=steps[side]
    )
    marks.reset()
    known = train()
    return {
        "seconds": marks.seconds,
        "peak_bytes": marks.peak or None,
        "new": new,
        "group": group,
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
        "versions": {name: _version(name) for name in ("torch", "transformers", "peft", "trl", "triton")},
        **known,
    }


class Marks:
    """Iterations, from one wait for the device to another, and the highest peak.

    Args:
        turn: Waits until it is this cell's turn.
        has_warm_up: Whether that is after the first iteration, or before it.
    """

    def __init__(self, turn: Callable[[], None], *, has_warm_up: bool) -> None:
        self.seconds: list[float] = []
        self.peak = 0
        self.has_warm_up = has_warm_up
        self._turn, self._since = turn, 0.0

    def reset(self) -> None:
        """Forget what construction took."""
        if not self.has_warm_up:
            self._turn()
        if ON_GPU:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def begin(self) -> None:
        """An iteration begins."""
        self._since = _now()

    def end(self) -> None:
        """It is over, and the next begins."""
        self.seconds.append(round(_now() - self._since, 4))
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() if ON_GPU else 0)
        if self.has_warm_up and len(self.seconds) == 1:
            self._turn()
        self.begin()


def _now() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _model(sizes: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(**sizes, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if ON_GPU else "cpu"):
            return Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def _adapters() -> LoraConfig:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a word for each token.

    Samples from random weights can then be judged.
    """
    words = {"<pad>": 0, "<eos>": 1} | {f"w{token}": token for token in range(2, vocabulary)}
    own = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def _reward(text: str) -> float:
    """Pay for something that hardly ever is the same in two completions."""
    return sum(map(ord, text)) / 1e5


class _Task:
    stop = ""

    def rewards(self, examples: Tensor, completions: Sequence[str], *, step: int = 0) -> dict[str, Tensor]:
        return {"total": torch.tensor([_reward(text) for text in completions])}


class _Timed:
    """A sampler whose time is taken."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler, self.decoding = sampler, ""
        self.seconds: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Completions:
        since = _now()
        found = self._sampler(*args, **kwargs)
        self.seconds.append(round(_now() - since, 4))
        self.decoding = found.decoding or ""
        return found


class _Iterations(Callback):
    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._marks.begin()

    @override
    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self._marks.end()


def _ours(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    marks: Marks,
    new: int,
    group: int,
    at_once: int,
    recompute: bool,
    steps: int,
) -> Callable[[], dict[str, Any]]:
    policy = get_peft_model(model, _adapters())
    sampler = _Timed(Sampler(policy, stop_ids=(1,)))
    module = GRPO(
        policy,
        task=_Task(),
        decode=lambda ids: str(tokenizer.decode(ids)),
        sampler=sampler,
        group_size=group,
        max_new_tokens=new,
        scale_rewards="group",
        learning_rate=LEARNING_RATE,
    )
    strategy = UnifiedStrategy(micro_batch_size=at_once, recompute=recompute)
    ids = torch.tensor(tokenizer(PROMPT)["input_ids"])
    rows: Any = [
        {"prompt": ids, "prompt_mask": torch.ones_like(ids, dtype=torch.bool), "example": torch.tensor(0)}
    ] * 64
    trainer = L.Trainer(
        accelerator="cuda" if ON_GPU else "cpu",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=steps,
        callbacks=[_Iterations(marks)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    def train() -> dict[str, Any]:
        trainer.fit(module, DataLoader(rows, batch_size=1))
        return {
            "sampling_seconds": sampler.seconds,
            "decoding": sampler.decoding,
            "sampling_gap": float(trainer.callback_metrics["train/sampling_gap"]),
            "micro_batch_size": strategy.policy.sizing.micro_batch_size,
            "events": strategy.policy.events,
            "loss": float(trainer.callback_metrics["train/loss"]),
            "lightning": L.__version__,
        }

    return train


class _Moments(TrainerCallback):
    """Marks iterations; of several, the first has few tokens, as `generation` requests."""

    def __init__(self, marks: Marks, *, new: int) -> None:
        self._marks, self._new = marks, new
        self.generation: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self._marks.has_warm_up:
            self.generation.max_new_tokens = FEW_TOKENS

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._marks.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._marks.end()
        self.generation.max_new_tokens = self._new


def _rival(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    marks: Marks,
    new: int,
    group: int,
    at_once: int,
    recompute: bool,
    steps: int,
) -> Callable[[], dict[str, Any]]:
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    moments = _Moments(marks, new=new)
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=group // at_once,
        num_generations=group,
        max_completion_length=new,
        gradient_checkpointing=recompute,
        learning_rate=LEARNING_RATE,
        bf16=True,
        use_cpu=not ON_GPU,
        report_to="none",
        save_strategy="no",
        logging_steps=100,
        beta=0.0,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [_reward(text) for text in completions],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [PROMPT] * 64}),
        processing_class=tokenizer,
        peft_config=_adapters(),
        callbacks=[moments],
    )
    moments.generation = trainer.generation_config
    return lambda: {"loss": trainer.train().training_loss}
