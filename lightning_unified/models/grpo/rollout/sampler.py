"""Sample completions from a causal language model, with exactly the trained weights."""

import copy
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unified.models.causal_lm.language_model import causal_lm, evaluating
from lightning_unified.models.choices import check_choice
from lightning_unified.models.grpo.rollout.compiled import can_compile
from lightning_unified.models.grpo.rollout.growing_decoder import GrowingDecoder, can_select
from lightning_unified.models.grpo.rollout.progress import Progress, Stopping
from lightning_unified.models.grpo.rollout.recorded_prompts import read_prompts
from lightning_unified.models.grpo.rollout.sampling import Completions, CompletionSampler, SamplingOptions, draw
from lightning_unified.models.grpo.rollout.static_cache import is_plain_cache
from lightning_unified.models.grpo.rollout.static_check import static_refusal
from lightning_unified.models.grpo.rollout.static_decoder import StaticDecoder

__all__ = ["DECODINGS", "Sampler", "SamplerSlot"]

log = logging.getLogger("lightning_unified")

DECODINGS = ("auto", "compiled", "captured", "static", "growing")
_KEPT_SHARE = 0.02  # share of the model's bytes: so small a cache does not matter in the loss pass


class Sampler:
    """Sample a group of completions for each prompt.

    The model reads a prompt once; all rows of its group share its keys and values. Then each step decodes one token for every row,
    over a static cache, on CUDA with compiled blocks recorded as a CUDA graph. Rows that have ended are dropped if that makes a step
    cheaper. Dropout and recomputation are off. Adapters are not merged, since bf16 rounding would lose most of a young adapter. The
    sampler runs in the caller's autocast. Another temperature needs no new graphs, because a recorded step contains no draw.

    A model with another cache than keys and values of every token (sliding windows, recurrent states) uses its own growing cache. So does
    a model whose step over a static cache gives other logits than over its own; the first rollout compares them. A warning says so once.

    Args:
        model: A causal language model of transformers, bare or wrapped by peft; it is not registered as a submodule.
        stop_ids: Tokens that end a completion.
        stop_text: A text that ends a completion; needs `decode`.
        decode: Turns a list of token ids into text.
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
        decoding: str = "auto",
        kept_bytes: int | Callable[[], int | None] | None = None,
    ) -> None:
        check_choice("decoding", decoding, DECODINGS)
        self._model, self._lm = model, causal_lm(model)
        self._stopping = Stopping(ids=stop_ids, text=stop_text, decode=decode)
        self._decoding = decoding
        self._kept_bytes = kept_bytes
        self._static: StaticDecoder | None = None
        self._refusal: str | None = None
        self._has_warned = False

    @property
    def cache_bytes(self) -> int:
        """Bytes held by the static cache and its graphs."""
        return 0 if self._static is None else self._static.nbytes

    @torch.no_grad()
    def __call__(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        options: SamplingOptions | None = None,
        *,
        generator: torch.Generator | None = None,
        **changes: Any,
    ) -> Completions:
        """Sample `options.group_size` completions of each prompt.

        Args:
            prompt: Token ids (P, S) on the model's device, pads on the left.
            prompt_mask: Whether each is a token and no pad (P, S).
            options: Numbers of completions and tokens, and the distribution to draw from; None for the defaults.
            generator: Random generator on the model's device; None for torch's own.
            changes: Fields of `SamplingOptions` with other values, such as `group_size=8`.

        Raises:
            ValueError: If shapes or positions do not fit.
        """
        options = replace(options, **changes) if options is not None else SamplingOptions(**changes)
        _check_prompts(prompt, prompt_mask)
        self._check_positions(prompt.shape[1], options.max_new_tokens)
        with evaluating(self._model):
            try:
                decoder, logits, decoding = self._begin(prompt, prompt_mask.bool(), options)
                progress = Progress(len(logits), most=options.max_new_tokens, device=prompt.device)
                _decode(decoder, logits, progress, options, stopping=self._stopping, generator=generator)
            finally:
                self._release_above_limit()
        ids, mask, log_probs, ended = progress.result()
        return Completions(ids=ids, mask=mask, log_probs=log_probs, ended=ended, decoding=decoding)

    def release(self) -> None:
        """Free a kept cache and its graphs."""
        if self._static is not None:
            self._static.release()

    def _begin(self, prompt: Tensor, mask: Tensor, options: SamplingOptions) -> tuple[Any, Tensor, str]:
        """Read the prompts; return a decoder, the first logits (N, V) and the decoding method."""
        group = options.group_size
        if self._static is not None:
            prompt, mask = self._static.padded(prompt, mask)
            logits, cache = self._static.read(prompt, mask)
        else:
            logits, cache = read_prompts(self._lm, prompt, mask)
        decoding = self._decoding_of(cache, device=prompt.device, length=prompt.shape[1])
        if decoding != "growing" and self._static is None:
            self._refusal = static_refusal(self._lm, cache, mask=mask, logits=logits)
            decoding = decoding if self._refusal is None else self._growing(self._refusal)
        if decoding != "growing":
            if self._static is None:
                captured = decoding in {"compiled", "captured"}
                self._static = StaticDecoder(self._lm, captured=captured, compiled=decoding == "compiled")
            self._static.begin(cache, mask=mask, group=group, new=options.max_new_tokens)
            return self._static, logits.repeat_interleave(group, 0), decoding
        growing = GrowingDecoder(self._lm)
        if group > 1 and not can_select(cache):
            del cache
            prompt, mask = prompt.repeat_interleave(group, 0), mask.repeat_interleave(group, 0)
            logits, cache = read_prompts(self._lm, prompt, mask)
            group = 1
        growing.begin(cache, mask=mask, group=group)
        return growing, logits.repeat_interleave(group, 0), decoding

    def _decoding_of(self, cache: Any, *, device: torch.device, length: int) -> str:
        """Return the decoding method for prompts of `length` tokens; warn once if it is slower."""
        attention = self._lm.config.get_text_config()._attn_implementation
        if self._decoding == "growing" or self._refusal is not None:
            return "growing"
        if not is_plain_cache(cache, length=length) or attention not in {"sdpa", "eager"}:
            name = type(self._lm).__name__
            return self._growing(
                f"the cache of {name} ({attention} attention) is not keys and values of every token alone"
            )
        return resolve_decoding(self._decoding, device=device)

    def _growing(self, reason: str) -> str:
        """Return the decoding over the model's own cache; warn once that it is slower."""
        if not self._has_warned:
            log.warning("Rollout decodes over the model's own growing cache, which is slower: %s.", reason)
            self._has_warned = True
        return "growing"

    def _release_above_limit(self) -> None:
        if self._static is None:
            return
        kept = self._kept_bytes() if callable(self._kept_bytes) else self._kept_bytes
        if kept is None:
            kept = int(_KEPT_SHARE * sum(one.nbytes for one in self._lm.parameters()))
        if self._static.nbytes > kept:
            self._static.release_prompts()
        if self._static.nbytes > kept:
            self._static.release()

    def _check_positions(self, length: int, new: int) -> None:
        most = getattr(self._lm.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and length + new > most:
            raise ValueError(
                f"{length} prompt tokens and {new} new ones; the model has {most} positions. Shorten the prompts or the completions."
            )


class SamplerSlot:
    """Holder of a module's sampler: the user's, or a `Sampler` that is made at its first use.

    A copy of the module has no sampler of the user and none that is made, because caches and graphs belong to one model.

    Args:
        given: The user's sampler; None for a `Sampler`.
        settings: Arguments of `Sampler`.
    """

    def __init__(self, given: CompletionSampler | None, **settings: Any) -> None:
        self._given, self._settings = given, settings
        self._made: Sampler | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "SamplerSlot":
        return SamplerSlot(None, **copy.deepcopy(self._settings, memo))

    @property
    def sampler(self) -> CompletionSampler:
        """The sampler."""
        if self._given is not None:
            return self._given
        if self._made is None:
            self._made = Sampler(**self._settings)
        return self._made

    @property
    def cache_bytes(self) -> int:
        """Bytes of the made sampler's cache."""
        return 0 if self._made is None else self._made.cache_bytes

    def release(self) -> None:
        """Free the made sampler's cache; the next rollout allocates it again."""
        if self._made is not None:
            self._made.release()


def resolve_decoding(decoding: str, *, device: torch.device) -> str:
    """Return the decoding method over a static cache; "auto" is the first that the device has.

    Raises:
        ValueError: If the method records CUDA graphs and the device is no CUDA device.
    """
    if decoding == "auto":
        return "compiled" if can_compile(device) else "captured" if device.type == "cuda" else "static"
    if decoding != "static" and device.type != "cuda":
        raise ValueError(
            f"decoding={decoding!r} records CUDA graphs and the model is on {device}; choose 'auto' or 'static'."
        )
    return decoding


def _decode(
    decoder: Any,
    logits: Tensor,
    progress: Progress,
    options: SamplingOptions,
    *,
    stopping: Stopping,
    generator: torch.Generator | None,
) -> None:
    """Draw and decode until every row has ended.

    On CUDA, the host reads a token while the device computes the next one.
    """
    ahead = logits.is_cuda
    while True:
        tokens, log_probs = draw(logits, options, generator=generator)
        arrived = progress.add(tokens, log_probs)
        if progress.full:
            progress.look(arrived, stopping)
            return
        if ahead:
            logits = decoder.step(tokens)
        live = progress.look(arrived, stopping)
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


def _check_prompts(prompt: Tensor, mask: Tensor) -> None:
    if prompt.ndim != 2 or prompt.shape != mask.shape:
        raise ValueError(f"prompt {tuple(prompt.shape)} and prompt_mask {tuple(mask.shape)} are not both (P, S).")
    if not bool(mask[:, -1].all()):
        raise ValueError("a prompt ends with a pad: pad prompts on the left, so that each ends in the last column.")
