"""Held-out loss, perplexity and samples of a fine-tuned model beside its base model."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_unified.models.causal_lm.labelled_rows import labelled
from lightning_unified.models.causal_lm.language_model import evaluating
from lightning_unified.models.causal_lm.sampling import Sampling
from lightning_unified.models.finetune.data.answers import AnswerMask
from lightning_unified.models.finetune.data.care import fitted, split_examples
from lightning_unified.models.finetune.data.examples import Example, read_examples
from lightning_unified.models.finetune.data.python_docs import python_docs
from lightning_unified.models.finetune.data.rows import ExampleRows
from lightning_unified.models.finetune.module import Finetune
from lightning_unified.models.finetune.presets import PRESETS
from lightning_unified.models.finetune.use.answering import Answerer, stop_ids
from lightning_unified.models.pretrained.adapters import adapter_layers, adapters_off

__all__ = ["Evaluation", "Sample", "evaluate", "held_out", "samples_of"]

_BASE = "base"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A prompt, the answer in the data, and the models' greedy answers by name."""

    prompt: str
    expected: str
    answers: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Figures on held-out examples.

    Attributes:
        examples: Number of examples.
        tokens: Number of scored tokens.
        losses: Mean cross-entropy of a scored token in nats, by model.
        samples: Some answers.
        without_base: Why there is no base model beside it; empty if there is one.
    """

    examples: int
    tokens: int
    losses: dict[str, float]
    samples: list[Sample]
    without_base: str = ""

    @property
    def perplexities(self) -> dict[str, float]:
        """exp(loss), by model."""
        return {name: math.exp(loss) for name, loss in self.losses.items()}

    def record(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {**asdict(self), "perplexities": self.perplexities}


def held_out(module: Finetune, path: str | None) -> list[Example]:
    """Return the examples of the file `path`; without it, the validation side of the data.

    Raises:
        RuntimeError: If the model was not trained with `FinetuneData`, so that its validation side is unknown.
        FileNotFoundError: If the file is not there any more.
    """
    if path is not None:
        return read_examples(Path(path).expanduser())
    settings = module.data_settings
    if not settings:
        raise RuntimeError("this model was not trained with FinetuneData; name the examples by --data.")
    source = settings["path"]
    examples = python_docs() if source is None else read_examples(Path(source).expanduser())
    return split_examples(examples, fraction=settings["val_fraction"], seed=settings["seed"]).validation


def evaluate(
    module: Finetune, examples: Sequence[Example], *, batch_size: int, samples: int, max_new_tokens: int
) -> Evaluation:
    """Return loss and samples of a model and of its base.

    The base is the model without its adapters, or as it was read.

    Raises:
        ValueError: If an example is invalid, or longer than the rows of the training (truncate, drop or refuse as set there).
    """
    settings = {
        "loss_on": "answers",
        "prompts": "auto",
        "sequence_length": 1024,
        "too_long": "refuse",
        **module.data_settings,
    }
    encode = AnswerMask(module.chat, loss_on=settings["loss_on"], prompts=settings["prompts"])
    length = settings["sequence_length"]
    sequences, _, _ = fitted(examples, encode, length=length, too_long=settings["too_long"])
    if not sequences:
        raise ValueError(f"none of {len(examples)} examples fits the {length} tokens of a row.")
    rows = ExampleRows(sequences, length=length, packed=False, pad_id=module.chat.pad_id)
    chosen = _some(examples, samples)
    losses, answers = {"model": _loss(module, rows, batch_size)}, {"model": _answers(module, chosen, max_new_tokens)}
    base, why = _base_of(module)
    if base is not None:
        with adapters_off(base.policy) if base is module else nullcontext():
            losses[_BASE] = _loss(base, rows, batch_size)
            answers[_BASE] = _answers(base, chosen, max_new_tokens, trained=module)
    shown = [
        Sample(
            prompt=one.question,
            expected=one.last_answer,
            answers={name: given[place] for name, given in answers.items()},
        )
        for place, one in enumerate(chosen)
    ]
    return Evaluation(examples=len(examples), tokens=rows.scored_tokens, losses=losses, samples=shown, without_base=why)


def samples_of(module: Finetune, examples: Sequence[Example], *, samples: int, max_new_tokens: int) -> list[str]:
    """Return some prompts with the model's greedy answers and the expected ones, as text."""
    asked = _some(examples, samples)
    answers = _answers(module, asked, max_new_tokens)
    return [
        f"asked: {one.question}\nanswered: {answer}\nexpected: {one.last_answer}"
        for one, answer in zip(asked, answers, strict=True)
    ]


def _some(examples: Sequence[Example], count: int) -> list[Example]:
    """Return up to `count` examples with a question, spread over the list.

    Neighbours may be similar.
    """
    asked = [one for one in examples if not one.text]
    return asked[:: max(len(asked) // max(count, 1), 1)][:count]


def _base_of(module: Finetune) -> tuple[Finetune | None, str]:
    """Return the model before fine-tuning, or why there is none."""
    if adapter_layers(module.policy):
        return module, ""
    hparams = module.hparams
    source = hparams["pretrained"] or PRESETS[hparams["preset"]].pretrained
    if source is None:
        return None, "its training began with random weights"
    names = ("preset", "dtype", "attention")
    try:
        base = Finetune(**{name: hparams[name] for name in names}, pretrained=source, lora_rank=None)
    except (FileNotFoundError, RuntimeError) as error:
        return None, f"its weights are not here: {error}"
    return base.to(next(module.policy.parameters()).device).eval(), ""


@torch.no_grad()
def _loss(module: Finetune, rows: ExampleRows, batch_size: int) -> float:
    """Return the mean cross-entropy of all scored tokens."""
    device = next(module.policy.parameters()).device
    order = rows.bucket_of.argsort(kind="stable").tolist()
    total = 0.0
    with evaluating(module.policy):
        for start in range(0, len(order), batch_size):
            batch = rows.__getitems__(order[start : start + batch_size])
            found = labelled(batch["tokens"].to(device), batch["labels"].to(device))
            total += float(module.cross_entropy(found)) * found["total"]
    return total / rows.scored_tokens


def _answers(
    module: Finetune, examples: Sequence[Example], max_new_tokens: int, *, trained: Finetune | None = None
) -> list[str]:
    """Return greedy answers to the tokens before each example's last answer, as in training."""
    owner = trained or module
    chat, greedy = owner.chat, Sampling(max_new_tokens=max_new_tokens, temperature=0.0, top_k=0, top_p=1.0)
    answerer = Answerer(module.policy, stop=stop_ids(chat))
    encode = AnswerMask(chat, loss_on="last", prompts=owner.data_settings.get("prompts", "auto"))
    found = []
    for encoded in map(encode, examples):
        prompt = encoded.ids[: int(encoded.scored.argmax())].tolist()
        found.append(chat.decode(list(answerer(prompt, greedy))))
    return found
