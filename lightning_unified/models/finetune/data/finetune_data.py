"""`FinetuneData`: conversations and texts of a user as resumable batches of labelled tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor
from typing_extensions import override

from lightning_unified.data import settings
from lightning_unified.data.loader import LoaderOptions
from lightning_unified.data.resumable import ResumableData
from lightning_unified.data.tokenizer import train_tokenizer
from lightning_unified.models.causal_lm.weights import find_language_model
from lightning_unified.models.finetune.data.answers import AnswerMask
from lightning_unified.models.finetune.data.care import (
    Sides,
    describe_lengths,
    fitted,
    length_histogram,
    split_examples,
)
from lightning_unified.models.finetune.data.examples import Example, read_examples
from lightning_unified.models.finetune.data.python_docs import python_docs
from lightning_unified.models.finetune.data.rows import ExampleRows
from lightning_unified.models.pretrained.chat import PLAIN_TEMPLATE, ChatTokenizer

__all__ = ["FinetuneData"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    sides: Sides
    chat: ChatTokenizer
    train: ExampleRows
    validation: ExampleRows
    lengths: list[int]
    left_out: int


class FinetuneData(ResumableData[ExampleRows]):
    """Conversations, prompts with completions, and plain texts, in a model's own tokens.

    Conversations use the model's template. `rows.ExampleRows` describes the batches. All results depend only on the arguments and the
    files; the global random state is never used.

    Args:
        path: A `.jsonl`, `.txt` or `.md` file or a folder of them, see `examples`; None for questions about Python's functions.
        pretrained: Model that provides tokenizer and chat template, see `models.causal_lm.weights.find_language_model`; None trains
            a tokenizer.
        vocab_size: Largest vocabulary of a trained tokenizer; no effect with `pretrained`.
        template: A file with a Jinja chat template in place of the model's own.
        loss_on: The scored turns: "answers", "last" or "all", see `answers.AnswerMask`.
        prompts: How a prompt and its completion are written: "auto", "chat" or "text", see `answers.AnswerMask`.
        packing: Whether a row holds several examples, which do not attend to each other; else each row is one example and padded.
        sequence_length: The most tokens of a row.
        too_long: Treatment of a longer conversation: "refuse", "drop" or "truncate". Plain texts are divided.
        batch_size: Rows of a batch over all ranks: the effective batch.
        val_batch_size: Rows of a validation batch; None for `batch_size`.
        val_fraction: Share of the conversations, and of the bytes of plain text, for validation.
        seed: Draws split and order.
        drop_last: Leave out rows that do not fill a training batch, other rows each epoch.
        num_workers: Processes that make batches; 0 for none. The next three arguments have no effect then.
        persistent_workers: Keep the workers from epoch to epoch.
        prefetch_factor: Batches that each worker makes ahead; None for PyTorch's 2.
        start_method: `fork`, `spawn` or `forkserver`; None for the system's own.
        pin_memory: Copy batches into page-locked memory.

    Raises:
        ValueError: If an argument makes no sense, or the examples do not fit it.
        FileNotFoundError: If files or tokenizer are not there.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        pretrained: str | None = None,
        vocab_size: int = 512,
        template: str | None = None,
        loss_on: Literal["answers", "last", "all"] = "answers",
        prompts: Literal["auto", "chat", "text"] = "auto",
        packing: bool = False,
        sequence_length: int = 1024,
        too_long: Literal["refuse", "drop", "truncate"] = "refuse",
        batch_size: int = 16,
        val_batch_size: int | None = None,
        val_fraction: float = 0.1,
        seed: int = 0,
        drop_last: bool = True,
        num_workers: int = 0,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        start_method: str | None = None,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(LoaderOptions.of(locals()))
        settings.check_counts(smallest=2, sequence_length=sequence_length)
        settings.check_fractions(val_fraction=val_fraction)
        settings.check_switches(packing=packing)
        settings.check_one_of("loss_on", loss_on, ("answers", "last", "all"))
        settings.check_one_of("prompts", prompts, ("auto", "chat", "text"))
        settings.check_one_of("too_long", too_long, ("refuse", "drop", "truncate"))
        self.sequence_length = sequence_length

    @property
    @override
    def tokenizer(self) -> Tokenizer:
        return self.chat.backend

    @property
    def chat(self) -> ChatTokenizer:
        """The tokenizer with its template."""
        return self._prepared.chat

    @property
    def held_out(self) -> list[Example]:
        """The validation examples."""
        return self._prepared.sides.validation

    @override
    def _zeros(self, rows: int) -> dict[str, Tensor]:
        tokens = torch.zeros(rows, self.sequence_length, dtype=torch.int64)
        packed = {"positions": tokens.clone()} if self.hparams["packing"] else {}
        return {"tokens": tokens, "labels": tokens.clone(), **packed}

    @override
    def describe_line(self) -> str:
        prepared, train, validation = self._prepared, *self.rows
        sides = prepared.sides
        parts = [
            f"{len(sides.train):,} examples to train ({train.scored_tokens:,} of {train.tokens:,} tokens scored, {len(train):,} rows)",
            f"{len(sides.validation):,} to validate ({validation.scored_tokens:,} tokens scored)",
            describe_lengths(prepared.lengths),
        ]
        counts = {
            "copies left out": sides.duplicates,
            "lines left out of validation, which training has": sides.leaked_lines,
            f"examples left out, longer than {self.sequence_length:,} tokens": prepared.left_out,
        }
        return "; ".join(parts + [f"{count:,} {what}" for what, count in counts.items() if count])

    def describe(self) -> dict[str, Any]:
        """Return counts of examples, tokens and rows, and the histogram of lengths."""
        prepared = self._prepared
        sides = {"train": prepared.sides.train, "validation": prepared.sides.validation}
        counts = {
            name: {"examples": len(side), "rows": len(rows), "tokens": rows.tokens, "scored_tokens": rows.scored_tokens}
            for (name, side), rows in zip(sides.items(), self.rows, strict=True)
        }
        return {
            "path": self.hparams["path"],
            "vocabulary": self.vocab_size,
            **counts,
            "duplicates": prepared.sides.duplicates,
            "lines_left_out_of_validation": prepared.sides.leaked_lines,
            "too_long_left_out": prepared.left_out,
            "examples_up_to_tokens": length_histogram(prepared.lengths),
        }

    @cached_property
    def _prepared(self) -> _Prepared:
        asked = self.hparams
        examples = python_docs() if asked["path"] is None else read_examples(Path(asked["path"]).expanduser())
        sides = split_examples(examples, fraction=asked["val_fraction"], seed=asked["seed"])
        chat = _chat(sides.train, pretrained=asked["pretrained"], template=asked["template"], size=asked["vocab_size"])
        encode = AnswerMask(chat, loss_on=asked["loss_on"], prompts=asked["prompts"])
        limit = {"length": self.sequence_length, "too_long": asked["too_long"]}
        train, train_lengths, dropped = fitted(sides.train, encode, **limit)
        validation, lengths, also_dropped = fitted(sides.validation, encode, **limit)
        for side, found in (("training", train), ("validation", validation)):
            if not found:
                raise ValueError(
                    f"no example of {side} fits data.sequence_length={self.sequence_length}; raise it, or set data.too_long=truncate."
                )
        shape = {"length": self.sequence_length, "packed": asked["packing"], "pad_id": chat.pad_id}
        return _Prepared(
            sides=sides,
            chat=chat,
            train=ExampleRows(train, **shape),
            validation=ExampleRows(validation, **shape),
            lengths=train_lengths + lengths,
            left_out=dropped + also_dropped,
        )


def _chat(examples: Sequence[Example], *, pretrained: str | None, template: str | None, size: int) -> ChatTokenizer:
    """Load the tokenizer of a pretrained model, or train one on the training examples."""
    own = None
    if template is not None:
        file = Path(template).expanduser()
        if not file.is_file():
            raise FileNotFoundError(f"data.template={template} does not exist; give a file with a Jinja chat template.")
        own = file.read_text(encoding="utf-8")
    if pretrained is not None:
        return ChatTokenizer.from_folder(find_language_model(pretrained), template=own)
    backend = train_tokenizer([example.content for example in examples], vocab_size=size)
    return ChatTokenizer(backend, template=own or PLAIN_TEMPLATE, end="</s>")
