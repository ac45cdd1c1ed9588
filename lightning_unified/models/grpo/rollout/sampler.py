"""Sample completions from a causal language model, with exactly the trained weights."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unified.models.choices import check_choice
from lightning_unified.models.grpo.rollout.compiled import can_compile
from lightning_unified.models.grpo.rollout.drawing import Drawing
from lightning_unified.models.grpo.rollout.growing_decoder import GrowingDecoder, can_select
from lightning_unified.models.grpo.rollout.language_model import causal_lm, forward_last, sampling
from lightning_unified.models.grpo.rollout.progress import Progress, Stopping
from lightning_unified.models.grpo.rollout.static_cache import is_plain_cache
from lightning_unified.models.grpo.rollout.static_decoder import StaticDecoder

__all__ = ["DECODINGS", "Completions", "Sampler"]

log = logging.getLogger("lightning_unified")

DECODINGS = ("auto", "compiled", "captured", "static", "growing")
_KEPT_SHARE = 0.02  # share of the model's bytes: so small a cache does not matter in the loss pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Completions:
    """Sampled completions: N = P x G rows, G for each prompt in a row, T tokens of the longest.

    Attributes:
        ids: Tokens (N, T), int64; 0 where the mask is False.
        mask: Whether each token belongs to its completion (N, T), the ending one included.
        log_probs: Log-probabilities of the sampled tokens (N, T), float32, by the softmax over all tokens at the sampling
            temperature; 0 where the mask is False.
        ended: Whether each row ended by itself (N); the others were truncated.
        decoding: The method, one of `DECODINGS` except "auto".
    """

    ids: Tensor
    mask: Tensor
    log_probs: Tensor
    ended: Tensor
    decoding: str


class Sampler:
    """Sample a group of completions for each prompt.

    The model reads a prompt once; all rows of its group share its keys and values. Then each step decodes one token for every row,
    over a static cache, on CUDA with compiled blocks recorded as a CUDA graph. Rows that have ended are dropped if that makes a step
    cheaper. Dropout and recomputation are off. Adapters are not merged, since bf16 rounding would lose most of a young adapter. The
    sampler runs in the caller's autocast.

    A model with another cache than keys and values of every token (sliding windows, recurrent states) uses its own growing cache.
    A warning says so once.

    Args:
        model: A causal language model of transformers, bare or wrapped by peft; it is not registered as a submodule.
        stop_ids: Tokens that end a completion.
        stop_text: A text that ends a completion; needs `decode`.
        decode: Turns a list of token ids into text.
        temperature: Divisor of the logits; 0 takes the likeliest token.
        top_k: Draw from the k likeliest tokens; 0 for all.
        top_p: Draw from the likeliest tokens that together have this probability; 1 for all.
        decoding: "compiled" (captured, with compiled blocks), "captured" (CUDA graph), "static" (static cache, step by step),
            "growing" (the model's own cache), or "auto": the first of these that the device has.
        kept_bytes: Limit on a static cache with its graphs that stays for the next call; a larger one is freed before the call
            returns. A function is called at the end of each call. None means 2 % of the model's bytes.

    Raises:
        ValueError: If `model` is no causal language model, or a setting is out of its range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stop_ids: Collection[int] = (),
        stop_text: str | None = None,
        decode: Callable[[list[int]], str] | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        decoding: str = "auto",
        kept_bytes: int | Callable[[], int | None] | None = None,
    ) -> None:
        check_choice("decoding", decoding, DECODINGS)
        self._model, self._lm = model, causal_lm(model)
        self._stopping = Stopping(ids=stop_ids, text=stop_text, decode=decode)
        self._drawing = Drawing(temperature=temperature, top_k=top_k, top_p=top_p)
        self._decoding = decoding
        self._kept_bytes = kept_bytes
        self._static: StaticDecoder | None = None
        self._said = False

    @property
    def cache_bytes(self) -> int:
        """Bytes held by the static cache and its graphs."""
        return 0 if self._static is None else self._static.nbytes

    @property
    def temperature(self) -> float:
        """Temperature of the next calls.

        A change costs nothing, because a recorded step contains no draw.
        """
        return self._drawing.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._drawing = replace(self._drawing, temperature=value)

    def __call__(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        *,
        group_size: int,
        max_new_tokens: int,
        generator: torch.Generator | None = None,
    ) -> Completions:
        """Sample `group_size` completions of at most `max_new_tokens` tokens for each prompt.

        Args:
            prompt: Token ids (P, S) on the model's device, pads on the left.
            prompt_mask: Whether each is a token and no pad (P, S).
            group_size: G.
            max_new_tokens: Upper bound on a completion's tokens, the ending one included.
            generator: Random generator on the model's device; None for torch's own.

        Raises:
            ValueError: If shapes, sizes or positions do not fit.
        """
        self._check(prompt, prompt_mask, group_size=group_size, new=max_new_tokens)
        with sampling(self._model):
            try:
                decoder, logits, how = self._begin(prompt, prompt_mask.bool(), group=group_size, new=max_new_tokens)
                progress = Progress(len(logits), most=max_new_tokens, device=prompt.device)
                self._decode(decoder, logits, progress=progress, generator=generator)
            finally:
                self._tidy()
        ids, mask, log_probs, ended = progress.result()
        return Completions(ids=ids, mask=mask, log_probs=log_probs, ended=ended, decoding=how)

    def release(self) -> None:
        """Free a kept cache and its graphs."""
        if self._static is not None:
            self._static.release()

    def _begin(self, prompt: Tensor, mask: Tensor, *, group: int, new: int) -> tuple[Any, Tensor, str]:
        logits, cache = self._read(prompt, mask)
        how = self._resolve(prompt.device, cache, length=prompt.shape[1])
        if how != "growing":
            if self._static is None:
                self._static = StaticDecoder(
                    self._lm, captured=how in {"compiled", "captured"}, compiled=how == "compiled"
                )
            self._static.begin(cache, mask=mask, group=group, new=new)
            return self._static, logits.repeat_interleave(group, 0), how
        growing = GrowingDecoder(self._lm)
        if group > 1 and not can_select(cache):
            del cache
            prompt, mask = prompt.repeat_interleave(group, 0), mask.repeat_interleave(group, 0)
            logits, cache = self._read(prompt, mask)
            group = 1
        growing.begin(cache, mask=mask, group=group)
        return growing, logits.repeat_interleave(group, 0), how

    def _read(self, prompt: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        return forward_last(self._lm, input_ids=prompt, attention_mask=mask.long(), position_ids=positions)

    def _resolve(self, device: torch.device, cache: Any, *, length: int) -> str:
        """Return the decoding method, and warn once about a slower one."""
        attention = self._lm.config.get_text_config()._attn_implementation
        plain = is_plain_cache(cache, length=length) and attention in {"sdpa", "eager"}
        how = self._decoding
        if not plain and how != "growing":
            self._say(
                f"the cache of {type(self._lm).__name__} ({attention} attention) is not keys and values of every token alone"
            )
            return "growing"
        if how == "auto":
            how = "compiled" if can_compile(device) else "captured" if device.type == "cuda" else "static"
        elif how in {"compiled", "captured"} and device.type != "cuda":
            raise ValueError(
                f"decoding={how!r} records CUDA graphs and the model is on {device}; choose 'auto' or 'static'."
            )
        return how

    def _say(self, why: str) -> None:
        if not self._said:
            log.warning("Rollout decodes over the model's own growing cache, which is slower: %s.", why)
            self._said = True

    def _decode(self, decoder: Any, logits: Tensor, *, progress: "Progress", generator: torch.Generator | None) -> None:
        """Draw and decode until every row has ended.

        The host reads a token while the device computes the next one.
        """
        ahead = logits.is_cuda
        while True:
            tokens, log_probs = self._drawing(logits, generator=generator)
            arrived = progress.add(tokens, log_probs)
            if progress.full:
                progress.look(arrived, self._stopping)
                return
            if ahead:
                logits = decoder.step(tokens)
            live = progress.look(arrived, self._stopping)
            if not live:
                return
            kept = None
            if (count := decoder.rows_worth_keeping(len(live))) < decoder.rows:
                kept = progress.keep(live, count)
                decoder.keep(kept)
            if not ahead:
                logits = decoder.step(tokens if kept is None else tokens[kept])
            elif kept is not None:
                logits = logits[kept]

    def _tidy(self) -> None:
        if self._static is None:
            return
        kept = self._kept_bytes() if callable(self._kept_bytes) else self._kept_bytes
        if kept is None:
            kept = int(_KEPT_SHARE * sum(one.nbytes for one in self._lm.parameters()))
        if self._static.nbytes > kept:
            self._static.release()

    def _check(self, prompt: Tensor, mask: Tensor, *, group_size: int, new: int) -> None:
        if prompt.ndim != 2 or prompt.shape != mask.shape:
            raise ValueError(f"prompt {tuple(prompt.shape)} and prompt_mask {tuple(mask.shape)} are not both (P, S).")
        if group_size < 1 or new < 1:
            raise ValueError(f"group_size={group_size} and max_new_tokens={new}: give 1 or more of each.")
        if not bool(mask[:, -1].all()):
            raise ValueError("a prompt ends with a pad: pad prompts on the left, so that each ends in the last column.")
        most = getattr(self._lm.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and prompt.shape[1] + new > most:
            raise ValueError(
                f"{prompt.shape[1]} prompt tokens and {new} new ones; the model has {most} positions. Shorten the prompts or the "
                "completions."
            )
