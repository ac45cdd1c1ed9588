"""Answer prompts token by token with a KV cache."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_unified.models.causal_lm.language_model import causal_lm, evaluating, forward_last, is_recurrent
from lightning_unified.models.causal_lm.sampling import Sampling, draw
from lightning_unified.models.finetune.data.answers import AnswerMask
from lightning_unified.models.finetune.data.examples import Example
from lightning_unified.models.pretrained.chat import ChatTokenizer

__all__ = ["Answerer", "prompt_of", "stop_ids"]


class Answerer:
    """A model that answers prompts, and keeps the keys and values of the last one.

    A prompt that continues the tokens of the call before, as the next turn of a conversation does, is read from there on.

    Args:
        model: A causal language model of transformers, in eval mode during calls, then restored.
        stop: Tokens that end an answer.
        generator: Random generator; by default torch's own.
    """

    def __init__(self, model: nn.Module, *, stop: Sequence[int], generator: torch.Generator | None = None) -> None:
        self._lm, self._stop, self._generator = causal_lm(model), frozenset(stop), generator
        self._device = next(model.parameters()).device
        self._read: list[int] = []
        self._cache: Any = None

    def __call__(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
        """Yield the tokens of the answer, without the one that ends it.

        An answer ends at the model's last position.

        Raises:
            ValueError: If the prompt is empty, or leaves no position for an answer.
        """
        positions = getattr(self._lm.config, "max_position_embeddings", None) or len(prompt) + sampling.max_new_tokens
        if not 0 < len(prompt) < positions:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; the model reads 1 to {positions - 1:,} before an answer. Begin a new conversation."
            )
        given = self._unread(list(prompt))
        for _ in range(min(sampling.max_new_tokens, positions - len(prompt))):
            token = self._next(given, sampling)
            if token in self._stop:
                return
            yield token
            given = [token]

    def _unread(self, prompt: list[int]) -> list[int]:
        """Return the prompt's tokens that are not cached; a different prompt begins a new cache.

        So does one that recurrent states would have to go on with by more than a token.
        """
        known = len(self._read)
        goes_on = self._cache is not None and known < len(prompt) and prompt[:known] == self._read
        if not goes_on or (len(prompt) > known + 1 and is_recurrent(self._cache)):
            self._read, self._cache = [], None
            return prompt
        return prompt[known:]

    @torch.no_grad()
    def _next(self, given: list[int], sampling: Sampling) -> int:
        ids = torch.tensor([given], device=self._device)
        positions = len(self._read) + torch.arange(len(given), device=self._device)[None]  # some models assume 0
        with evaluating(self._lm):
            logits, self._cache = forward_last(self._lm, input_ids=ids, position_ids=positions, cache=self._cache)
        self._read += given
        return int(draw(logits.float(), sampling=sampling, generator=self._generator))


def stop_ids(chat: ChatTokenizer) -> list[int]:
    """Return the tokens that end an answer: the end token and the template's end-of-turn token."""
    found = [chat.end_id]
    if chat.template:
        turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
        encoded = AnswerMask(chat, loss_on="last", prompts="auto")(Example(where="a probe", messages=turns))
        last = int(encoded.ids[encoded.scored][-1])
        if chat.backend.id_to_token(last) in {one.content for one in chat.backend.get_added_tokens_decoder().values()}:
            found.append(last)
    return sorted(set(found))


def prompt_of(chat: ChatTokenizer, turns: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the tokens of a conversation up to the next answer.

    Without a template, they are those of the last turn's text. Special tokens that the model puts before texts are included.
    """
    if chat.template:
        return chat.prompt(turns)
    ids = chat.backend.encode(turns[-1]["content"], add_special_tokens=True).ids
    return ids[:-1] if ids[-1:] == [chat.end_id] else ids
