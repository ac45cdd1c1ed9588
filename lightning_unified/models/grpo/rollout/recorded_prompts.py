"""Read prompts by CUDA graphs.

A pass over a short prompt takes the time of its launches, several times that of its products.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_unified.models.causal_lm.language_model import beyond_rounding, forward_last
from lightning_unified.models.grpo.rollout.capture import capture, new_pool, pool_bytes, refusing_waits

__all__ = ["RecordedPrompts", "padded", "read_prompts"]

log = logging.getLogger("lightning_unified")

_MULTIPLE = 32  # judgement: so many tokens more take no longer, and lengths come again
_MOST_TOKENS = 2048  # judgement: with more, products take longer than launches, and a recording much memory
_SHARE, _LEAST = 0.04, 64 * 2**20  # judgement: bytes of all recordings, of the model's bytes, or at least so many


def padded(prompt: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return prompts and their mask (P, S) with more pads on the left.

    Their length is then one that comes again. Prompts with too many tokens for a recording stay as they are.
    """
    P, S = prompt.shape
    more = -S % _MULTIPLE
    if P * (S + more) > _MOST_TOKENS:
        return prompt, mask
    return functional.pad(prompt, (more, 0)), functional.pad(mask, (more, 0))


def read_prompts(lm: Any, prompt: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
    """Return the logits (P, V) after prompts (P, S), pads on the left, and the model's cache."""
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    return forward_last(lm, input_ids=prompt, attention_mask=mask.long(), position_ids=positions)


class RecordedPrompts:
    """Reader of prompts that records shapes which come again.

    It records a shape at its second time, and replays it from the third time on. A recording is made only if its logits are those of the
    model, and if all recordings take few bytes. If one fails, no further one is made.

    Args:
        lm: A causal language model of transformers, whose weights stay at their addresses.
        dtype: Dtype of the products in attention.
        context: Returns a context in which the model runs.

    Attributes:
        nbytes: Bytes of the graphs' memory pool.
    """

    def __init__(self, lm: Any, *, dtype: torch.dtype, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._lm, self._dtype, self._context = lm, dtype, context
        self._pool = new_pool()
        self._seen: set[tuple[int, ...]] = set()
        self._recordings: dict[tuple[int, ...], _Recording] = {}
        self._records = True
        self._most_bytes = max(_LEAST, int(_SHARE * sum(one.nbytes for one in lm.parameters())))
        self.nbytes = 0

    def read(self, prompt: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        """Return what `read_prompts` returns; the next call overwrites it."""
        shape = tuple(prompt.shape)
        if shape in self._recordings:
            return self._recordings[shape].replay(prompt, mask)
        logits, cache = read_prompts(self._lm, prompt, mask)
        is_small = prompt.numel() <= _MOST_TOKENS and self.nbytes + _bytes_of(cache) <= self._most_bytes
        if self._records and shape in self._seen and is_small:
            self._record(prompt, mask, own=logits)
        self._seen.add(shape)
        return logits, cache

    def _record(self, prompt: Tensor, mask: Tensor, *, own: Tensor) -> None:
        try:
            recording = _Recording(self._lm, prompt, mask, dtype=self._dtype)
            with self._context():
                recording.record(own, pool=self._pool)
        except Exception as error:  # a model may wait for the device, or need more memory than there is
            log.debug("Prompts of %s are not recorded: %s", type(self._lm).__name__, error)
            self._records = False
        else:
            self._recordings[tuple(prompt.shape)] = recording
            self.nbytes = pool_bytes(self._pool)


def _bytes_of(cache: Any) -> int:
    """Return the bytes of keys and values, which a recording holds."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


class _Recording:
    """Recorded forward pass over prompts of one shape."""

    def __init__(self, lm: Any, prompt: Tensor, mask: Tensor, *, dtype: torch.dtype) -> None:
        self._lm, self._dtype = lm, dtype
        self._ids, self._mask = prompt.clone(), mask.clone()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: list[Any] = []

    def record(self, own: Tensor, *, pool: Any) -> None:
        """Record the pass, whose logits must be `own`.

        Raises:
            RuntimeError: If they are not, or if the model waits for the device.
        """
        with refusing_waits():  # an interrupted recording would leave torch's generator unusable
            self._once()
        difference = beyond_rounding(self._result[0], own, dtype=self._dtype)
        if difference is not None:
            raise RuntimeError(f"with a mask of four dimensions, its logits differ by {difference:.3g}")
        self._graph = capture(self._once, state=(), pool=pool)

    def replay(self, prompt: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        """Return the logits and the cache of other prompts of this shape."""
        assert self._graph is not None
        self._ids.copy_(prompt)
        self._mask.copy_(mask)
        self._graph.replay()
        logits, cache = self._result
        return logits, cache

    def _once(self) -> None:
        """Read the prompts with a mask of four dimensions.

        The model does not look into such a mask, for which it would wait for the device.
        """
        S, device = self._ids.shape[1], self._ids.device
        self._result.clear()
        sees = torch.ones(S, S, dtype=torch.bool, device=device).tril() & self._mask[:, None, None, :]
        mask = torch.zeros(sees.shape, dtype=self._dtype, device=device)
        mask.masked_fill_(~sees, torch.finfo(self._dtype).min)
        positions = (self._mask.long().cumsum(1) - 1).clamp(min=0)
        self._result += forward_last(self._lm, input_ids=self._ids, attention_mask=mask, position_ids=positions)
