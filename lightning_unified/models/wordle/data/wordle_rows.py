"""Turns of Wordle games as tensors: traces and prompts."""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_unified.data.loader import BatchRows
from lightning_unified.data.tokenizer import serial
from lightning_unified.models.pretrained.chat import ChatTokenizer
from lightning_unified.models.wordle.data.own_prompts import OwnPrompt
from lightning_unified.models.wordle.data.traces import Trace

__all__ = ["IGNORED", "PromptRows", "TraceRows", "pad_prompts"]

IGNORED = -100


class TraceRows(BatchRows):
    """Traces as whole batches.

    A batch has `tokens` (B, S) int64, padded at the end, and `labels` (B, S): the completion's tokens at their positions, `IGNORED`
    elsewhere.

    Args:
        traces: The turns.
        chat: The tokenizer; a completion ends with its end-of-turn token.
        length: S, the upper bound of every row.

    Raises:
        ValueError: If a row is longer.
    """

    def __init__(self, traces: Sequence[Trace], *, chat: ChatTokenizer, length: int) -> None:
        self._prompts = _prompts(traces, chat)
        self._completions = [[*ids, chat.end_id] for ids in _encoded([trace.completion for trace in traces], chat)]
        self._pad_id, self._length = chat.pad_id, length
        sizes = [len(prompt) + len(answer) for prompt, answer in zip(self._prompts, self._completions, strict=True)]
        if max(sizes, default=0) > length:
            raise ValueError(
                f"data.text_length={length}: a trace has {max(sizes)} tokens in this tokenizer; give at least as many."
            )
        self.bucket_of = np.zeros(len(sizes), dtype=np.int64)
        self.checksum = _checksum([*self._prompts, *self._completions])

    def longest(self) -> list[int]:
        """Return the rows with the most tokens and with the longest completion."""
        sizes = [len(answer) for answer in self._completions]
        totals = [len(prompt) + size for prompt, size in zip(self._prompts, sizes, strict=True)]
        return [int(np.argmax(totals)), int(np.argmax(sizes))]

    @override
    def __len__(self) -> int:
        return len(self._prompts)

    @override
    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return the batch of the rows `indices`; -1 stands for a row without labels."""
        tokens = torch.full((len(indices), self._length), self._pad_id)
        labels = torch.full_like(tokens, IGNORED)
        for row, index in enumerate(indices):
            if index < 0:
                continue
            prompt, answer = self._prompts[index], torch.tensor(self._completions[index])
            span = slice(len(prompt), len(prompt) + len(answer))
            tokens[row, : len(prompt)] = torch.tensor(prompt)
            tokens[row, span] = labels[row, span] = answer
        return {"tokens": tokens, "labels": labels}


class PromptRows:
    """Prompts as whole batches.

    A batch has `prompt` (P, L) int64, padded at the start, `prompt_mask` (P, L) bool, and `example` (P), the number of each.

    Args:
        asked: Turns with the states to ask for, or prompts of a file.
        chat: The tokenizer.
        length: L, the upper bound of every prompt.

    Raises:
        ValueError: If a row is longer.
    """

    def __init__(self, asked: Sequence[Trace | OwnPrompt], *, chat: ChatTokenizer, length: int) -> None:
        self._prompts = _prompts(asked, chat)
        self._pad_id, self._length = chat.pad_id, length
        longest = max((len(prompt) for prompt in self._prompts), default=0)
        if longest > length:
            raise ValueError(
                f"data.prompt_length={length}: a prompt has {longest} tokens in this tokenizer; give at least as many."
            )
        self.checksum = _checksum(self._prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return the batch of the states `indices`."""
        prompt, mask = pad_prompts([self._prompts[index] for index in indices], self._pad_id, length=self._length)
        return {"prompt": prompt, "prompt_mask": mask, "example": torch.tensor(indices)}


def pad_prompts(prompts: Sequence[Sequence[int]], pad_id: int, *, length: int) -> tuple[Tensor, Tensor]:
    """Return ids (P, L) int64 with pads on the left, and the mask (P, L) bool of tokens."""
    ids = torch.full((len(prompts), length), pad_id)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.tensor(prompt)
    counts = torch.tensor([len(prompt) for prompt in prompts])
    return ids, torch.arange(length) >= (length - counts)[:, None]


def _prompts(asked: Sequence[Trace | OwnPrompt], chat: ChatTokenizer) -> list[list[int]]:
    return _encoded([one.text(chat) for one in asked], chat)


def _encoded(texts: list[str], chat: ChatTokenizer) -> list[list[int]]:
    with serial():
        return [each.ids for each in chat.backend.encode_batch_fast(texts, add_special_tokens=False)]


def _checksum(rows: Sequence[Sequence[int]]) -> int:
    found = 0
    for row in rows:
        found = zlib.crc32(np.array([len(row), *row], dtype=np.int32).tobytes(), found)
    return found
